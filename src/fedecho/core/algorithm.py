"""What an algorithm is: four pure-looking methods on an explicit state. No base class, no registration.

A state passed in is spent: tensors the state OWNS are changed in place, tensors that came in are read only. Whoever runs an
algorithm calls it by ``call_init``, ``call_receive``, ``call_ready`` and ``call_advance``, which check both sides of that contract.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fedecho.core.types import Advance, Arrival, GlobalModel, Weights

S = TypeVar("S")
METHODS = ("init", "receive", "ready", "advance")


class Algorithm(Protocol[S]):
    """A server's method. Write one as a frozen dataclass whose fields are its hyper-parameters."""

    def init(self, model: GlobalModel) -> S:
        """The state before the first arrival."""
        ...

    def receive(self, state: S, arrival: Arrival) -> S:
        """Take one admitted update into the buffer."""
        ...

    def ready(self, state: S) -> bool:
        """Is the buffer full?"""
        ...

    def advance(self, state: S, model: GlobalModel) -> Advance[S]:
        """Make x_{t+1} from x_t and empty the buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Demands:
    """What a method asks of the parties around it. An algorithm that asks nothing need not mention it."""

    synchronous: bool = False
    """The server waits for the whole buffer before it sends any new work."""
    proximal: float = 0.0
    """Clients add proximal / 2 |y - x_s|^2 to their loss."""
    control_variates: bool = False
    """Clients keep c_i, correct every step by c - c_i and report how c_i moved."""
    correct_once: bool = False
    """They correct where they ended up, once, in place of every step."""


def demands(algorithm: Algorithm[Any]) -> Demands:
    """The algorithm's own ``demands``, or none."""
    found = getattr(algorithm, "demands", Demands())
    return found if isinstance(found, Demands) else Demands()


def check_algorithm(algorithm: object, what: str = "algorithm") -> None:
    """Raise a TypeError that names the methods ``algorithm`` lacks."""
    if isinstance(algorithm, type):
        raise TypeError(f"{what} must be an object, got the class {algorithm.__name__}: call it, {algorithm.__name__}(...)")
    name = type(algorithm).__name__
    lacking = [method for method in METHODS if not callable(getattr(algorithm, method, None))]
    if lacking:
        raise TypeError(f"{what} must have the methods {_listed(METHODS)}, but {name} has no {_listed(lacking, 'or')}")
    if callable(getattr(type(algorithm), "demands", None)):
        raise TypeError(f"{name}.demands must be a property: put @property above it")


def call_init(algorithm: Algorithm[S], model: GlobalModel) -> S:
    """The first state."""
    tensors = tensors_of(model)
    before = write_counts(tensors)
    state = algorithm.init(model)
    if write_counts(tensors) != before:
        raise _changed(algorithm, "init", OF_MODEL, tensors, before)
    return state


def call_receive(algorithm: Algorithm[S], state: S, arrival: Arrival) -> S:
    """The next state. Raise if the method returned none, or wrote to a tensor that it must only read."""
    update = arrival.update
    tensors = (update.delta, update.buffers, update.correction, *tensors_of(arrival.base), *tensors_of(arrival.current))
    before = write_counts(tensors)
    try:
        fresh = algorithm.receive(state, arrival)
    except (AttributeError, TypeError) as error:
        _check_there_was_a_state(algorithm, "receive", state, error)
        raise
    if write_counts(tensors) != before:
        raise _changed(algorithm, "receive", OF_ARRIVAL, tensors, before)
    if fresh is None or isinstance(fresh, Advance):
        raise TypeError(f"{_name(algorithm)}.receive must return the new state, got {_kind(fresh)}")
    return fresh


def call_ready(algorithm: Algorithm[S], state: S) -> bool:
    """Is the buffer full?"""
    try:
        ready = algorithm.ready(state)
    except (AttributeError, TypeError) as error:
        _check_there_was_a_state(algorithm, "ready", state, error)
        raise
    if type(ready) is not bool:
        advice = "return the comparison" if ready is None else "wrap it in bool(...)"
        raise TypeError(f"{_name(algorithm)}.ready must return True or False, got {_kind(ready)}: {advice}")
    return ready


def call_advance(algorithm: Algorithm[S], state: S, model: GlobalModel) -> Advance[S]:
    """The step. Raise if it is none, if its model does not have the shape of ``model``, or if ``model`` itself was changed."""
    tensors = tensors_of(model)
    before = write_counts(tensors)
    try:
        advance = algorithm.advance(state, model)
    except (AttributeError, TypeError) as error:
        _check_there_was_a_state(algorithm, "advance", state, error)
        raise
    if write_counts(tensors) != before:
        raise _changed(algorithm, "advance", OF_MODEL, tensors, before)
    method = f"{_name(algorithm)}.advance"
    if not isinstance(advance, Advance):
        raise TypeError(f"{method} must return Advance(state, weights), got {_kind(advance)}")
    if not isinstance(advance.weights, Weights):
        kind = _kind(advance.weights)
        raise TypeError(f"{method} must return Advance(state, Weights(params, buffers)), got {kind} in place of the weights")
    _check_vector(method, "weights.params", advance.weights.params, model.weights.params)
    _check_vector(method, "weights.buffers", advance.weights.buffers, model.weights.buffers)
    if advance.correction is not None:
        _check_vector(method, "correction", advance.correction, model.weights.params)
    if advance.metrics:
        _check_metrics(method, advance.metrics)
    return advance


OF_MODEL = ("model.weights.params", "model.weights.buffers", "model.correction")
OF_ARRIVAL = (
    *("arrival.update.delta", "arrival.update.buffers", "arrival.update.correction"),
    *(f"arrival.{which}.{tensor.removeprefix('model.')}" for which in ("base", "current") for tensor in OF_MODEL),
)
Tensors = tuple[Tensor | None, ...]


def write_counts(tensors: Tensors) -> tuple[int, ...]:
    """How often each tensor, or another view of its memory, was written to in place, as torch counts it.

    torch does not count writes through ``.data`` or a NumPy array, and counts nothing for tensors of ``inference_mode``.
    """
    try:
        return tuple([-1 if tensor is None else tensor._version for tensor in tensors])
    except RuntimeError:  # one of inference_mode; asking each of them first takes as long as all the rest
        return tuple([-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors])


def tensors_of(model: GlobalModel) -> Tensors:
    return model.weights.params, model.weights.buffers, model.correction


def _changed(algorithm: object, method: str, names: tuple[str, ...], tensors: Tensors, before: tuple[int, ...]) -> ValueError:
    now = write_counts(tensors)
    changed = next(name for name, old, new in zip(names, before, now, strict=True) if old != new)
    return ValueError(
        f"{_name(algorithm)}.{method} changed {changed} in place, which it may only read: work on a clone "
        "(a tensor that the state writes to must not be one that came in or was published)"
    )


def _check_there_was_a_state(algorithm: object, method: str, state: object, error: Exception) -> None:
    """A method that forgot to return the state is blamed, not the next one, which was given None."""
    if state is None and "NoneType" in str(error):
        raise TypeError(
            f"{_name(algorithm)}.{method} cannot work on the state None ({error}): init, or Advance(state, weights), gave no state"
        ) from error


def _check_vector(method: str, name: str, got: object, like: Tensor) -> None:
    if not isinstance(got, Tensor):
        raise TypeError(f"{method}: {name} must be a tensor, got {_kind(got)}")
    if got.shape != like.shape:
        raise ValueError(f"{method}: {name} must have shape {tuple(like.shape)}, got {tuple(got.shape)}")
    if got.dtype != like.dtype:
        raise ValueError(f"{method}: {name} must be {like.dtype}, got {got.dtype}: convert it with .to({like.dtype})")
    if got.device != like.device or got.layout != like.layout:
        raise ValueError(f"{method}: {name} must be {like.layout} on {like.device}, got {got.layout} on {got.device}")
    if got.requires_grad:
        raise ValueError(f"{method}: {name} must not require gradients: detach() it, or compute it under torch.no_grad()")


def _check_metrics(method: str, metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{method}: metrics must be a dict of numbers, got {_kind(metrics)}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"{method}: the names of metrics must be strings, got {name!r}")
        if not isinstance(value, int | float):
            raise TypeError(f"{method}: metrics[{name!r}] must be a number, got {_kind(value)}: use float(...)")


def _name(algorithm: object) -> str:
    return type(algorithm).__name__


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _listed(names: Sequence[str], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"

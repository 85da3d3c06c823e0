"""The ``Algorithm`` protocol: four methods on an explicit state. No base class, no registration.

Methods consume the state they are given: they may change tensors the state OWNS in place, and must only read tensors that come
in. Call an algorithm through ``call_init``, ``call_receive``, ``call_ready`` and ``call_advance``, which check this contract.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar, runtime_checkable

from torch import Tensor

from fedecho.core.task import defines
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights

S = TypeVar("S")
METHODS = ("init", "receive", "ready", "advance")


class Algorithm(Protocol[S]):
    """A server-side aggregation method. Write one as a frozen dataclass whose fields are its hyper-parameters."""

    def init(self, model: GlobalModel) -> S:
        """Return the state before the first arrival."""
        ...

    def receive(self, state: S, arrival: Arrival) -> S:
        """Add one admitted update to the buffer."""
        ...

    def ready(self, state: S) -> bool:
        """Report whether the buffer is full."""
        ...

    def advance(self, state: S, model: GlobalModel) -> Advance[S]:
        """Compute x_{t+1} from x_t and empty the buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Demands:
    """What an algorithm requires of the server and the clients. An algorithm without requirements need not define it."""

    synchronous: bool = False
    """The server waits for the whole buffer before it sends new work."""
    proximal: float = 0.0
    """Clients add proximal / 2 |y - x_s|^2 to their loss."""
    control_variates: bool = False
    """Clients keep c_i, correct every step by c - c_i and report the change in c_i."""
    correct_once: bool = False
    """Clients correct their final parameters once instead of every step."""


@runtime_checkable
class Demanding(Protocol):
    """An algorithm with requirements of its own."""

    @property
    def demands(self) -> Demands: ...


@runtime_checkable
class Buffered(Protocol):
    """An algorithm that waits for M updates before each step. M is None if the method it wraps declares none."""

    @property
    def buffer_size(self) -> int | None: ...


class Corrects(Protocol[S]):
    """An algorithm with control variates that can be reset."""

    def without_corrections(self, state: S) -> S:
        """Return the state with c = 0, for clients that have lost their c_i."""
        ...


def demands(algorithm: object) -> Demands:
    """Return the algorithm's ``demands``, or none. A field that has this name by chance is ignored."""
    if isinstance(algorithm, Demanding) and isinstance(algorithm.demands, Demands):
        return algorithm.demands
    return Demands()


def buffer_size_of(algorithm: object) -> int | None:
    """Return the algorithm's ``buffer_size`` M, or None if it declares none."""
    size = algorithm.buffer_size if isinstance(algorithm, Buffered) else None
    return None if size is None else int(size)


def corrects(algorithm: Algorithm[S]) -> TypeGuard[Corrects[S]]:
    """Report whether the algorithm has a method ``without_corrections``."""
    return defines(algorithm, "without_corrections")


def check_algorithm(algorithm: object, what: str = "algorithm") -> None:
    """Raise a TypeError that names the methods ``algorithm`` lacks."""
    if isinstance(algorithm, type):
        raise TypeError(f"{what} must be an object, got the class {algorithm.__name__}: call it, {algorithm.__name__}(...)")
    name = type(algorithm).__name__
    missing = [method for method in METHODS if not callable(getattr(algorithm, method, None))]
    if missing:
        raise TypeError(f"{what} must have the methods {_listed(METHODS)}, but {name} has no {_listed(missing, 'or')}")
    if callable(getattr(type(algorithm), "demands", None)):
        raise TypeError(f"{name}.demands must be a property: put @property above it")


def call_init(algorithm: Algorithm[S], model: GlobalModel) -> S:
    """Return the initial state. Raise if ``init`` wrote to the model."""
    tensors = tensors_of(model)
    before = write_counts(tensors)
    state = algorithm.init(model)
    if write_counts(tensors) != before:
        raise _changed(algorithm, "init", OF_MODEL, tensors, before)
    return state


def call_receive(algorithm: Algorithm[S], state: S, arrival: Arrival) -> S:
    """Return the next state. Raise if ``receive`` returned none or wrote to a tensor that it may only read."""
    update = arrival.update
    tensors = (update.delta, update.buffers, update.correction, *tensors_of(arrival.base), *tensors_of(arrival.current))
    before = write_counts(tensors)
    try:
        new_state = algorithm.receive(state, arrival)
    except (AttributeError, TypeError) as error:
        _check_state_exists(algorithm, "receive", state, error)
        raise
    if write_counts(tensors) != before:
        raise _changed(algorithm, "receive", OF_ARRIVAL, tensors, before)
    if new_state is None or isinstance(new_state, Advance):
        raise TypeError(f"{_name(algorithm)}.receive must return the new state, got {_kind(new_state)}")
    return new_state


def call_ready(algorithm: Algorithm[S], state: S) -> bool:
    """Report whether the buffer is full. Raise if ``ready`` returned anything but a bool."""
    try:
        ready = algorithm.ready(state)
    except (AttributeError, TypeError) as error:
        _check_state_exists(algorithm, "ready", state, error)
        raise
    if type(ready) is not bool:
        advice = "return the comparison" if ready is None else "wrap it in bool(...)"
        raise TypeError(f"{_name(algorithm)}.ready must return True or False, got {_kind(ready)}: {advice}")
    return ready


def call_advance(algorithm: Algorithm[S], state: S, model: GlobalModel) -> Advance[S]:
    """Take the step. Raise if the result is not an ``Advance`` that fits ``model``, or if ``model`` itself was changed."""
    tensors = tensors_of(model)
    before = write_counts(tensors)
    try:
        advance = algorithm.advance(state, model)
    except (AttributeError, TypeError) as error:
        _check_state_exists(algorithm, "advance", state, error)
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
    """Return torch's count of in-place writes to each tensor or to another view of its memory.

    torch does not count writes through ``.data`` or a NumPy array, nor any writes to ``inference_mode`` tensors.
    """
    try:
        return tuple([-1 if tensor is None else tensor._version for tensor in tensors])
    except RuntimeError:  # an inference_mode tensor; checking each tensor up front would double the cost
        return tuple([-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors])


def tensors_of(model: GlobalModel) -> Tensors:
    return model.weights.params, model.weights.buffers, model.correction


def _changed(algorithm: object, method: str, names: tuple[str, ...], tensors: Tensors, before: tuple[int, ...]) -> ValueError:
    now = write_counts(tensors)
    changed = next(name for name, old, new in zip(names, before, now, strict=True) if old != new)
    return ValueError(
        f"{_name(algorithm)}.{method} changed {changed} in place, which it may only read: work on a clone "
        "(a tensor that the state writes to must not be an input or one that was published)"
    )


def _check_state_exists(algorithm: object, method: str, state: object, error: Exception) -> None:
    """Blame the method that forgot to return the state, not the next one, which was given None."""
    if state is None and "NoneType" in str(error):
        raise TypeError(
            f"{_name(algorithm)}.{method} was given the state None ({error}): "
            "return a state from init and in Advance(state, weights)"
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

"""A user's own algorithm that breaks the contract is named with its method, what it did and what to do."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from small_server import answer, answer_to, first_model, make_server
from torch import Tensor, nn

from fedecho.algorithms import FedAsync, FedBuff, FedEcho
from fedecho.algorithms.noised import Noised
from fedecho.core.algorithm import Algorithm, Demands, call_advance, call_receive, check_algorithm
from fedecho.core.server import Server
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights
from fedecho.learning.privacy import Privacy


@dataclass(frozen=True)
class State:
    """A mean of two. Owned."""

    delta: Tensor
    buffers: Tensor
    size: int = 0


@dataclass(frozen=True)
class Mine:
    """A correct algorithm, of which a test spoils one method."""

    spoil_receive: Callable[[Arrival], object] = lambda arrival: None
    spoil_advance: Callable[[GlobalModel], object] = lambda model: None

    def init(self, model: GlobalModel) -> Any:
        return State(torch.zeros_like(model.weights.params), torch.zeros_like(model.weights.buffers))

    def receive(self, state: Any, arrival: Arrival) -> Any:
        self.spoil_receive(arrival)
        update = arrival.update
        return State(state.delta + update.delta / 2, state.buffers + update.buffers / 2, state.size + 1)

    def ready(self, state: Any) -> Any:
        return state.size == 2

    def advance(self, state: Any, model: GlobalModel) -> Any:
        self.spoil_advance(model)
        return Advance(self.init(model), Weights(model.weights.params + state.delta, state.buffers))


def driven(algorithm: Any, num_versions: int = 2) -> Server[Any]:
    """Clients answer in the order they were asked, so that some are stale; every model has a correction."""
    server = make_server(algorithm=algorithm)
    first = replace(first_model(), correction=torch.ones(3))
    server.versions.current = first
    waiting = server.refill()
    while server.model.version < num_versions:
        server.receive(answer_to(waiting.pop(0)))
        waiting += server.refill()
        if server.ready:
            server.advance()
            server.versions.current = replace(server.model, correction=torch.ones(3))
    return server


def test_a_correct_algorithm_runs() -> None:
    assert driven(Mine()).model.version == 2


READ_ONLY: dict[str, Callable[[Arrival], Tensor | None]] = {
    "arrival.update.delta": lambda arrival: arrival.update.delta,
    "arrival.update.buffers": lambda arrival: arrival.update.buffers,
    "arrival.update.correction": lambda arrival: arrival.update.correction,
    "arrival.base.weights.params": lambda arrival: arrival.base.weights.params,
    "arrival.base.weights.buffers": lambda arrival: arrival.base.weights.buffers,
    "arrival.base.correction": lambda arrival: arrival.base.correction,
    "arrival.current.weights.params": lambda arrival: arrival.current.weights.params,
    "arrival.current.weights.buffers": lambda arrival: arrival.current.weights.buffers,
    "arrival.current.correction": lambda arrival: arrival.current.correction,
}


@pytest.mark.parametrize("name", READ_ONLY)
@pytest.mark.parametrize("view", [False, True])
def test_receive_that_writes_to_what_it_was_given_is_named(name: str, view: bool) -> None:
    def spoil(arrival: Arrival) -> None:
        if arrival.staleness:  # else base and current are one
            tensor = READ_ONLY[name](arrival)
            assert tensor is not None
            (tensor[:1] if view else tensor).mul_(2)

    with pytest.raises(ValueError, match=rf"^Mine\.receive changed {name} in place, which it may only read: work on a clone"):
        driven(Mine(spoil_receive=spoil))


OF_MODEL: dict[str, Callable[[GlobalModel], Tensor | None]] = {
    "model.weights.params": lambda model: model.weights.params,
    "model.weights.buffers": lambda model: model.weights.buffers,
    "model.correction": lambda model: model.correction,
}


@pytest.mark.parametrize("name", OF_MODEL)
def test_advance_and_init_that_write_to_the_published_model_are_named(name: str) -> None:
    def spoil(model: GlobalModel) -> None:
        tensor = OF_MODEL[name](model)
        if tensor is not None:
            tensor.add_(1)

    with pytest.raises(ValueError, match=rf"^Mine\.advance changed {name} in place"):
        driven(Mine(spoil_advance=spoil))

    class Early(Mine):
        def init(self, model: GlobalModel) -> Any:
            spoil(model)
            return super().init(model)

    if name != "model.correction":
        with pytest.raises(ValueError, match=rf"^Early\.init changed {name} in place"):
            make_server(algorithm=Early())


def test_a_state_that_goes_on_in_a_published_tensor_is_named() -> None:
    """The sum of all deltas is the model: what was published is written to by the next arrival."""

    @dataclass(frozen=True)
    class InPlace(Mine):
        def init(self, model: GlobalModel) -> Any:
            return State(model.weights.params.clone(), model.weights.buffers.clone())

        def receive(self, state: Any, arrival: Arrival) -> Any:
            return State(state.delta.add_(arrival.update.delta), state.buffers, state.size + 1)

        def advance(self, state: Any, model: GlobalModel) -> Any:
            return Advance(replace(state, size=0), Weights(state.delta, state.buffers))

    with pytest.raises(
        ValueError, match=r"^InPlace\.receive changed arrival\.current\.weights\.params in place.*was published"
    ):
        driven(InPlace())


def test_a_model_that_changes_long_after_it_was_published_ends_the_run() -> None:
    """The state keeps the model before this one, and writes to it while clients still train from it."""

    @dataclass(frozen=True)
    class Before(Mine):
        kept: list[Tensor] = field(default_factory=list)

        def advance(self, state: Any, model: GlobalModel) -> Any:
            self.kept.append(model.weights.params)
            if len(self.kept) == 2:
                self.kept[0].mul_(0.5)
            return super().advance(state, model)

    server = make_server(algorithm=Before(), num_clients=5, concurrency=5)
    late, *others = server.refill()
    for dispatch in others:
        server.receive(answer_to(dispatch))
        if server.ready:
            server.advance()
    with pytest.raises(ValueError, match=r"^the model of version 0 was changed in place while clients trained from it"):
        server.receive(answer_to(late))


def test_a_wrapped_algorithm_is_the_one_that_is_named() -> None:
    algorithm = Mine(spoil_receive=lambda arrival: arrival.base.weights.params.zero_())
    noised = Noised(inner=algorithm, privacy=Privacy(noise_multiplier=0.1), seed=0, variances=torch.tensor([False, False]))
    with pytest.raises(ValueError, match=r"^Mine\.receive changed arrival\.base\.weights\.params in place"):
        driven(noised)


def test_tensors_that_count_no_writes_are_taken() -> None:
    class Inference(Mine):
        def advance(self, state: Any, model: GlobalModel) -> Any:
            with torch.inference_mode():
                return super().advance(state, model)

    server = driven(Inference(), 3)
    assert server.model.weights.params.is_inference()


@dataclass(frozen=True)
class Broken(Mine):
    """One method gives what ``result`` makes of the right answer."""

    method: str = "advance"
    result: Callable[[Any], Any] = lambda right: None

    def init(self, model: GlobalModel) -> Any:
        return self.given("init", super().init(model))

    def receive(self, state: Any, arrival: Arrival) -> Any:
        return self.given("receive", super().receive(state, arrival))

    def ready(self, state: Any) -> Any:
        return self.given("ready", super().ready(state))

    def advance(self, state: Any, model: GlobalModel) -> Any:
        right = Mine.init(self, model)
        return self.given("advance", Advance(right, Weights(model.weights.params + state.delta, state.buffers)))

    def given(self, method: str, right: Any) -> Any:
        return self.result(right) if method == self.method else right


def weights(**changes: Any) -> Callable[[Any], Any]:
    return lambda right: replace(right, weights=replace(right.weights, **changes))


WRONG: dict[str, tuple[str, Callable[[Any], Any], type[Exception]]] = {
    r"Broken\.receive must return the new state, got None": ("receive", lambda right: None, TypeError),
    r"Broken\.receive must return the new state, got Advance": (
        "receive",
        lambda right: Advance(right, first_model().weights),
        TypeError,
    ),
    r"Broken\.receive was given the state None \(.*\): return a state from init and in Advance\(state, weights\)": (
        "init",
        lambda right: None,
        TypeError,
    ),
    r"Broken\.receive was given the state None \('NoneType' object has no attribute 'delta'\)": (
        "advance",
        lambda right: replace(right, state=None),
        TypeError,
    ),
    r"Broken\.ready must return True or False, got None: return the comparison": ("ready", lambda right: None, TypeError),
    r"Broken\.ready must return True or False, got Tensor: wrap it in bool\(\.\.\.\)": ("ready", torch.tensor, TypeError),
    r"Broken\.ready must return True or False, got bool_?: wrap": ("ready", np.bool_, TypeError),
    r"Broken\.ready must return True or False, got int": ("ready", int, TypeError),
    r"Broken\.advance must return Advance\(state, weights\), got None": ("advance", lambda right: None, TypeError),
    r"Broken\.advance must return Advance\(state, weights\), got Weights": ("advance", lambda right: right.weights, TypeError),
    r"Broken\.advance must return Advance\(state, weights\), got tuple": (
        "advance",
        lambda right: (right.state, right.weights),
        TypeError,
    ),
    r"Broken\.advance must return Advance\(state, Weights\(params, buffers\)\), got State in place of the weights": (
        "advance",
        lambda right: Advance(right.weights, right.state),
        TypeError,
    ),
    r"Broken\.advance: weights\.params must be a tensor, got ndarray": ("advance", weights(params=np.zeros(3)), TypeError),
    r"Broken\.advance: weights\.params must have shape \(3,\), got \(2,\)": (
        "advance",
        weights(params=torch.zeros(2)),
        ValueError,
    ),
    r"Broken\.advance: weights\.buffers must have shape \(2,\), got \(\)": (
        "advance",
        weights(buffers=torch.zeros(())),
        ValueError,
    ),
    r"Broken\.advance: weights\.params must be torch\.float32, got torch\.float64: convert it": (
        "advance",
        weights(params=torch.zeros(3, dtype=torch.float64)),
        ValueError,
    ),
    r"Broken\.advance: weights\.params must be torch\.strided on cpu, got torch\.sparse_coo on cpu": (
        "advance",
        weights(params=torch.zeros(3).to_sparse()),
        ValueError,
    ),
    r"Broken\.advance: weights\.params must be torch\.strided on cpu, got torch\.strided on meta": (
        "advance",
        weights(params=torch.zeros(3, device="meta")),
        ValueError,
    ),
    r"Broken\.advance: weights\.params must not require gradients": (
        "advance",
        weights(params=nn.Parameter(torch.zeros(3))),
        ValueError,
    ),
    r"Broken\.advance: correction must have shape \(3,\), got \(1,\)": (
        "advance",
        lambda right: replace(right, correction=torch.zeros(1)),
        ValueError,
    ),
    r"Broken\.advance: metrics must be a dict of numbers, got list": (
        "advance",
        lambda right: replace(right, metrics=[1.0]),
        TypeError,
    ),
    r"Broken\.advance: metrics\['norm'\] must be a number, got Tensor: use float\(\.\.\.\)": (
        "advance",
        lambda right: replace(right, metrics={"norm": right.weights.params.norm()}),
        TypeError,
    ),
    r"Broken\.advance: the names of metrics must be strings, got 3": (
        "advance",
        lambda right: replace(right, metrics={3: 1.0}),
        TypeError,
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_method_that_returns_the_wrong_thing_is_told_what_it_must_return(message: str) -> None:
    method, result, kind = WRONG[message]
    with pytest.raises(kind, match=f"^{message}") as raised:
        driven(Broken(method=method, result=result))
    assert "\n" not in str(raised.value)


def test_an_error_of_the_users_own_is_left_as_it_is() -> None:
    def spoil(arrival: Arrival) -> None:
        raise AttributeError("'State' object has no attribute 'delat'")

    with pytest.raises(AttributeError, match=r"^'State' object has no attribute 'delat'$"):
        driven(Mine(spoil_receive=spoil))


def test_none_is_a_state_like_any_other() -> None:
    """As in the README: nothing to remember until somebody arrives."""

    class Newest:
        def init(self, model: GlobalModel) -> None:
            return None

        def receive(self, state: Weights | None, arrival: Arrival) -> Weights | None:
            return Weights(arrival.base.weights.params + arrival.update.delta, arrival.update.buffers)

        def ready(self, state: Weights | None) -> bool:
            return state is not None

        def advance(self, state: Weights | None, model: GlobalModel) -> Advance[Weights | None]:
            assert state is not None
            return Advance(None, state)

    assert driven(Newest()).model.version == 2


class Halfway:
    """Two of the four methods, and one that is a number."""

    ready = 3

    def init(self, model: GlobalModel) -> int:
        return 0

    def receive(self, state: int, arrival: Arrival) -> int:
        return 1


class Forgot(Mine):
    """A method where a property is wanted would be passed over."""

    def demands(self) -> Demands:
        return Demands(synchronous=True)


NO_ALGORITHMS: list[tuple[Any, str]] = [
    (Halfway(), "{} must have the methods init, receive, ready and advance, but Halfway has no ready or advance"),
    ("fedbuff", "{} must have the methods init, receive, ready and advance, but str has no init, receive, ready or advance"),
    (FedBuff, r"{} must be an object, got the class FedBuff: call it, FedBuff\(\.\.\.\)"),
    (Forgot(), r"Forgot\.demands must be a property: put @property above it"),
]


@pytest.mark.parametrize(("algorithm", "message"), NO_ALGORITHMS)
def test_what_is_no_algorithm_is_named_when_it_is_given(algorithm: Any, message: str) -> None:
    with pytest.raises(TypeError, match="^" + message.format("algorithm")):
        make_server(algorithm=algorithm)
    with pytest.raises(TypeError, match="^" + message.format("inner")):
        FedEcho(inner=algorithm)
    with pytest.raises(TypeError, match="^" + message.format("algorithm")):
        check_algorithm(algorithm)


def test_fedasync_owns_the_statistics_it_was_sent() -> None:
    """What became of a client's tensors after they were received is nobody's business."""
    algorithm: Algorithm[Any] = FedAsync()
    server = make_server(algorithm=algorithm)
    dispatch = server.refill()[0]
    update = answer(server, dispatch.client)
    expected = update.buffers.clone()
    state = call_receive(algorithm, server.state, Arrival(update, server.model, server.model))
    update.buffers.fill_(9.0)
    assert torch.equal(call_advance(algorithm, state, server.model).weights.buffers, expected)

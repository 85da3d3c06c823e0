"""Mistakes seen in the loops around the methods: selection, order of events, and the base of Delta.

As in ``test_mistakes``, every check passes for the package's own object and is shown to catch the mistake planted in a variant.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import oracle
import pytest
import scenarios
import torch
from torch import Tensor, nn

from fedecho.algorithms import FedAsync, FedBuff, FedEcho
from fedecho.algorithms.fedecho import FedEchoState
from fedecho.core.clients import Idle
from fedecho.core.layout import Layout
from fedecho.core.server import OpenJob, Server
from fedecho.core.types import Arrival, ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.learning import LocalTraining, Trainer
from fedecho.simulation.events import Event, EventQueue

# A client picked that is already training.


def server_of(make: type[Server[Any]], algorithm: Any, num_clients: int, concurrency: int) -> Server[Any]:
    model = scenarios.published(scenarios.first_model())
    return make(algorithm=algorithm, model=model, num_clients=num_clients, concurrency=concurrency, seed=0)


def check_picks(make: type[Server[Any]]) -> None:
    """Whoever is sent work has none open, over 200 answers in a drawn order."""
    rng, at_work = np.random.default_rng(0), {}
    server = server_of(make, FedBuff(buffer_size=3), num_clients=6, concurrency=4)
    for _ in range(200):
        for dispatch in server.refill():
            assert dispatch.client not in at_work, f"client {dispatch.client} is training already"
            at_work[dispatch.client] = dispatch
        assert len(at_work) == 4
        dispatch = at_work.pop(sorted(at_work)[rng.integers(4)])
        server.receive(scenarios.update_of(scenarios.draw_sent(rng, dispatch.client, dispatch.model.version)))
        if server.ready:
            server.advance()


class ForgetsToRemove(Idle):
    def remove(self, client: int) -> None:
        pass


class PicksAnybody(Server[Any]):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.idle = ForgetsToRemove(range(self.num_clients), self.num_clients)


class FreesTheWrongClient(Server[Any]):
    """Puts back a client other than the one that reported."""

    def _close(self, client: int, work: OpenJob) -> GlobalModel:
        self.idle.add((client + 1) % self.num_clients)
        return super()._close(client, work)


# Heap entries compared beyond the time.


def check_ties(make: type[EventQueue]) -> None:
    """Events at one time come in the order they were put, whatever is in them; none of them can be compared."""
    queue = make()
    ties = [Event("finish", client, dispatch) for client, dispatch in ((5, 9), (3, 2), (9, 4), (0, 7))]
    try:
        for event in ties:
            queue.put(2.0, event)
        queue.put(1.0, Event("drop", 8, 8))
        popped = [queue.pop() for _ in range(5)]
    except TypeError as error:
        raise AssertionError(f"the heap compared events: {error}") from error
    assert popped == [Event("drop", 8, 8), *ties]
    assert queue.now == 2.0


class ComparesEvents(EventQueue):
    def put(self, time: float, event: Event) -> None:
        heappush(self._heap, (time, event))

    def pop(self) -> Event:
        self.now, event = heappop(self._heap)
        return event


class ComparesClients(EventQueue):
    def put(self, time: float, event: Event) -> None:
        heappush(self._heap, (time, event.client, event))


class LastInFirstOut(EventQueue):
    def put(self, time: float, event: Event) -> None:
        heappush(self._heap, (time, -self._next, event))
        self._next += 1


# Delta measured against the current model: in the server, in FedEcho and at the client.


def check_server_base(make: type[Server[Any]]) -> None:
    """An algorithm is handed the model that the client was sent, with its staleness."""
    server = server_of(make, FedAsync(), num_clients=3, concurrency=2)
    slow, quick = server.refill()
    rng, sent = np.random.default_rng(1), []
    for dispatch in (quick, slow):
        sent.append([scenarios.draw_sent(rng, dispatch.client, 0)])
        assert server.receive(scenarios.update_of(sent[-1][0])).status == "accepted"
        server.advance()
    expected = oracle.run(oracle.fedasync(0.6, oracle.power(0.5)), scenarios.first_model(), sent)
    scenarios.assert_same([server.model], expected[2:], 1e-12)


class HandsOnTheCurrent(Server[Any]):
    def _close(self, client: int, work: OpenJob) -> GlobalModel:
        super()._close(client, work)
        return self.model


def check_echo_base(make: type[FedEcho[Any]]) -> None:
    """The bank holds the logits of x_s + Delta with the client's own statistics."""
    inputs, rng = scenarios.unlabeled(), np.random.default_rng(2)
    algorithm = make(inner=FedBuff(buffer_size=2), student=scenarios.linear_student(inputs))
    base, current = (scenarios.first_model(seed) for seed in (0, 1))
    models = [scenarios.published(model, version=version) for version, model in ((0, base), (3, current))]
    sent = scenarios.draw_sent(rng, 1, 0)
    state = algorithm.receive(algorithm.init(models[0]), Arrival(scenarios.update_of(sent), *models))
    expected = oracle.Linear(inputs, scenarios.CLASSES).logits(base.params + sent.delta, sent.buffers)
    assert np.allclose(state.bank.teacher().numpy(), expected, rtol=0, atol=1e-5)


class EchoesTheCurrent(FedEcho[Any]):
    def receive(self, state: FedEchoState[Any], arrival: Arrival) -> FedEchoState[Any]:
        return super().receive(state, replace(arrival, base=arrival.current))


class EchoesWithTheServersStatistics(FedEcho[Any]):
    def receive(self, state: FedEchoState[Any], arrival: Arrival) -> FedEchoState[Any]:
        return super().receive(state, replace(arrival, update=replace(arrival.update, buffers=arrival.current.weights.buffers)))


@dataclass(frozen=True)
class Pull:
    """A task whose loss is |w - client|^2 / 2, so that a step of size lr moves w by lr (client - w)."""

    num_clients: int = 3

    def num_examples(self, client: int) -> int:
        return 4

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> int:
        return client

    def loss(self, module: nn.Module, batch: int) -> Tensor:
        return sum((p - batch).square().sum() / 2 for p in module.parameters())


def check_trainer_base(make: Callable[..., Trainer]) -> None:
    """A job from version 0 reports y - x_0, though the worker has trained from version 1 in between."""
    module = nn.Linear(1, 1)
    layout = Layout.of(module)
    trainer = make(Pull(), LocalTraining(client_lr=0.5, epochs=2, batch_size=4), layout.bind(module))
    models = [GlobalModel(version, Weights(torch.full((2,), at), torch.zeros(0))) for version, at in ((0, 0.0), (1, 8.0))]
    deltas = []
    for number, (client, version) in enumerate([(1, 0), (2, 1), (1, 0)]):
        update = trainer.train(Dispatch(number, client, models[version], seed=number))
        assert update.base_version == version
        deltas.append(update.delta.tolist())
    # Two steps halve the distance to the client twice: three quarters of 1 - 0, and of 2 - 8.
    assert deltas == [[0.75] * 2, [-4.5] * 2, [0.75] * 2]
    assert [model.weights.params.tolist() for model in models] == [[0.0] * 2, [8.0] * 2], "a published model was written to"


@dataclass(frozen=True)
class MeasuresAgainstTheNewest(Trainer):
    newest: list[GlobalModel] = field(default_factory=list)

    def train(self, dispatch: Dispatch, control: Tensor | None = None) -> ClientUpdate:
        update = super().train(dispatch, control)
        self.newest.append(dispatch.model)
        newest = max(self.newest, key=lambda model: model.version)
        return replace(update, delta=dispatch.model.weights.params + update.delta - newest.weights.params)


@dataclass(frozen=True)
class GoesOnFromItsLastModel(Trainer):
    def train(self, dispatch: Dispatch, control: Tensor | None = None) -> ClientUpdate:
        stay = replace(dispatch.model, weights=self.network.weights.clone())
        return super().train(replace(dispatch, model=stay), control)


MISTAKES: list[tuple[Callable[[Any], None], Any, list[Any]]] = [
    (check_picks, Server, [PicksAnybody, FreesTheWrongClient]),
    (check_ties, EventQueue, [ComparesEvents, ComparesClients, LastInFirstOut]),
    (check_server_base, Server, [HandsOnTheCurrent]),
    (check_echo_base, FedEcho, [EchoesTheCurrent, EchoesWithTheServersStatistics]),
    (check_trainer_base, Trainer, [MeasuresAgainstTheNewest, GoesOnFromItsLastModel]),
]


@pytest.mark.parametrize(("check", "right"), [(check, right) for check, right, _ in MISTAKES])
def test_package_does_not_make_the_mistake(check: Callable[[Any], None], right: Any) -> None:
    check(right)


@pytest.mark.parametrize(("check", "wrong"), [(check, wrong) for check, _, wrongs in MISTAKES for wrong in wrongs])
def test_planted_mistake_is_caught(check: Callable[[Any], None], wrong: Any) -> None:
    with pytest.raises(AssertionError):
        check(wrong)

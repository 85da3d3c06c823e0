"""The schedule drawn ahead: which dispatches will be answered before the last version.

Who finishes when, and from which version, depends on draws alone and not on what is learnt, so the schedule of a run is that of
the same run with nothing to learn. An executor that knows it never trains what falls past the end. It is a hint: where an update
is rejected the real run goes on a little longer, and what was not foreseen is computed when it is due.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch

from fedecho.core.algorithm import Demands
from fedecho.core.clients import NumberSet
from fedecho.core.loop import Moment, drive
from fedecho.core.server import Server
from fedecho.core.types import Advance, Arrival, ClientUpdate, GlobalModel, Weights
from fedecho.executors.executor import SerialExecutor
from fedecho.simulation.transport import VirtualTransport


@dataclass(frozen=True)
class Counting:
    """An algorithm that counts to M and learns nothing."""

    buffer_size: int
    demands: Demands

    def init(self, model: GlobalModel) -> int:
        return 0

    def receive(self, state: int, arrival: Arrival) -> int:
        return state + 1

    def ready(self, state: int) -> bool:
        return state >= self.buffer_size

    def advance(self, state: int, model: GlobalModel) -> Advance[int]:
        return Advance(0, model.weights)


@dataclass(frozen=True)
class Forecast:
    """The numbers of all dispatches whose updates arrive in time, and the most versions alive at once."""

    answered: Set[int]
    peak_alive: int


def forecast(
    *,
    buffer_size: int,
    demands: Demands,
    num_clients: int,
    concurrency: int,
    seed: int,
    num_versions: int,
    dispatch_after_step: bool,
    make_transport: Callable[[SerialExecutor], VirtualTransport],
    watch: Callable[[Moment], None] = lambda moment: None,
) -> Forecast:
    """The schedule up to version ``num_versions``; ``watch`` sees every moment of it."""
    nothing = torch.zeros(0)
    synchronous = Demands(synchronous=demands.synchronous)
    server = Server(
        algorithm=Counting(buffer_size, synchronous),
        model=GlobalModel(0, Weights(nothing, nothing)),
        num_clients=num_clients,
        concurrency=concurrency,
        seed=seed,
    )
    answered = NumberSet()
    fruitless = 0

    def note(moment: Moment) -> bool:
        """Stops where nobody ever arrives: the run itself will say so."""
        nonlocal fruitless
        watch(moment)
        accepted = moment.receipt.status == "accepted"
        fruitless = 0 if accepted else fruitless + 1
        if accepted:
            answered.add(moment.receipt.dispatch)
        return fruitless > most_fruitless(num_clients)

    executor = SerialExecutor(lambda job: ClientUpdate(job.dispatch.client, job.dispatch.model.version, nothing, nothing, 1, 1))
    drive(
        server,
        make_transport(executor),
        num_versions=num_versions,
        dispatch_after_step=dispatch_after_step,
        watch=note,
    )
    return Forecast(answered, server.versions.peak_alive)


def most_fruitless(num_clients: int) -> int:
    """Messages in a row without an update after which a run is not going anywhere."""
    return 10_000 + 20 * num_clients

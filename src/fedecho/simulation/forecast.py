"""Forecast of a run's schedule: which dispatches are answered before the last version.

Which client finishes when, and from which version, depends only on random draws and not on the training. The schedule can
therefore be computed with training stubbed out, and an executor that has it never trains jobs that fall past the end of the
run. The forecast is a hint: if an update is rejected, the real run takes longer, and unforeseen jobs are computed when due.
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
    """An algorithm that publishes a version after every M updates without changing the model."""

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
    """The numbers of all dispatches answered in time, and the largest number of versions alive at once."""

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
    """Compute the schedule up to version ``num_versions``; ``watch`` is called with every moment."""
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
        """Record an arrival; stop if updates no longer arrive (the run itself reports that as an error)."""
        nonlocal fruitless
        watch(moment)
        accepted = moment.receipt.status == "accepted"
        fruitless = 0 if accepted else fruitless + 1
        if accepted:
            answered.add(moment.receipt.dispatch)
        return fruitless > stall_limit(num_clients)

    executor = SerialExecutor(lambda job: ClientUpdate(job.dispatch.client, job.dispatch.model.version, nothing, nothing, 1, 1))
    drive(server, make_transport(executor), num_versions=num_versions, dispatch_after_step=dispatch_after_step, watch=note)
    return Forecast(answered, server.versions.peak_alive)


def stall_limit(num_clients: int) -> int:
    """Return the number of consecutive messages without an update after which a run is considered stalled."""
    return 10_000 + 20 * num_clients

"""A run over a network, from the first node to the summary: the same server and the same loop as in a simulation."""

from collections.abc import Callable
from typing import Any

from fedecho.core.drive import Moment, drive
from fedecho.core.server import Receipt, Server
from fedecho.core.types import GlobalModel, Joined, Left
from fedecho.experiments.config import ConfigError
from fedecho.experiments.summary import Summary
from fedecho.flower.journal import Journal
from fedecho.flower.transport import GridTransport

Evaluate = Callable[[GlobalModel], dict[str, Any] | None]
Watch = Callable[[Moment, dict[str, Any] | None], None]
MAX_FRUITLESS = 100


def federate(
    server: Server[Any],
    transport: GridTransport,
    journal: Journal,
    *,
    num_versions: int,
    evaluate: Evaluate = lambda model: None,
    eval_every: int = 1,
    dispatch_after_step: bool = False,
    watch: Watch = lambda moment, scores: None,
) -> Summary:
    """Wait for nodes, run to version T, write it all down."""
    fruitless = _Fruitless()

    def see(moment: Moment) -> None:
        scores = None
        if moment.step is not None and (moment.step.model.version % eval_every == 0 or server.model.version == num_versions):
            scores = evaluate(moment.step.model)
        journal.moment(moment, scores)
        watch(moment, scores)
        fruitless.see(moment.receipt, set(transport.roster.clients))

    present = set(transport.gather())
    for moment in journal.lose_what_was_open():
        watch(moment, None)
    for client in range(server.num_clients):
        if client not in present:
            server.receive(Left(client))  # no news for the record: it is not here yet
        elif client not in server.idle:
            server.receive(Joined(client))
    drive(server, transport, num_versions=num_versions, watch=see, dispatch_after_step=dispatch_after_step)
    return journal.finish()


class _Fruitless:
    """Ends a run in which everybody who is there keeps failing. One who might still answer is waited for."""

    def __init__(self) -> None:
        self._jobs = 0
        self._failing: set[int] = set()

    def see(self, receipt: Receipt, present: set[int]) -> None:
        if receipt.status == "accepted":
            self._jobs = 0
            self._failing.clear()
        elif receipt.status in ("rejected", "lost"):
            self._jobs += 1
            self._failing.add(receipt.client)
        if self._jobs >= MAX_FRUITLESS and present and present <= self._failing:
            raise ConfigError(f"not one of the last {self._jobs} jobs gave an update; the last one: {receipt.reason}")

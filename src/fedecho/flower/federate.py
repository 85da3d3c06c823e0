"""A run over a network, from the first node to the summary: the same server and the same loop as in a simulation."""

from collections.abc import Callable
from typing import Any

from fedecho.core.drive import Moment, drive
from fedecho.core.server import Server
from fedecho.core.types import GlobalModel, Joined, Left
from fedecho.experiments.standstill import Failures, check_scores
from fedecho.experiments.summary import Summary
from fedecho.flower.journal import Journal
from fedecho.flower.run_log import RunLog
from fedecho.flower.transport import GridTransport

Evaluate = Callable[[GlobalModel], dict[str, Any] | None]
Watch = Callable[[Moment], None]


def federate(
    server: Server[Any],
    transport: GridTransport,
    journal: Journal,
    *,
    num_versions: int,
    evaluate: Evaluate = lambda model: None,
    eval_every: int = 1,
    evaluate_first: bool = False,
    dispatch_after_step: bool = False,
    watch: Watch = lambda moment: None,
    say: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Wait for nodes, run to version T, write it all down. ``evaluate_first`` is of version 0, which is in no mean."""
    if journal.finished is not None:
        return journal.finished
    log, failures = RunLog(server, journal, say), Failures()

    def see(moment: Moment) -> None:
        scores = None
        if moment.step is not None and (moment.step.model.version % eval_every == 0 or server.model.version == num_versions):
            scores = evaluate(moment.step.model)
            check_scores(moment.step.model.version, scores or {})
        journal.moment(moment, scores)
        watch(moment)
        log.see(moment, scores)
        failures.see(moment.receipt, set(transport.roster.clients))

    log.begin()
    try:
        if evaluate_first and not journal.num_moments:
            journal.first_scores(evaluate(server.model))
        present = set(transport.gather())
        for moment in journal.lose_what_was_open():
            log.see(moment, None)
        for client in range(server.num_clients):
            if client not in present:
                server.receive(Left(client))  # not for the record: it is not here yet
            elif client not in server.idle:
                server.receive(Joined(client))
        drive(server, transport, num_versions=num_versions, watch=see, dispatch_after_step=dispatch_after_step)
        summary = journal.finish()
    except Exception:
        log.stopped()
        raise
    log.end(summary)
    return summary

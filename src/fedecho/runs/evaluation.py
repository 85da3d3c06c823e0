"""Periodic evaluation of the model, and a stopwatch for client and server time."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fedecho.core.loop import Transport
from fedecho.core.task import Stopped, Task, counts_labels, progress_callback
from fedecho.core.types import Dispatch, Message
from fedecho.runs.build import Simulation
from fedecho.runs.config import ConfigError
from fedecho.runs.identity import MOST_LISTED
from fedecho.runs.record import OF_CLASS
from fedecho.runs.run_stats import EvaluationWatch, Watch, check_scores
from fedecho.runs.summary import STRAGGLER_ACCURACY
from fedecho.simulation.runtimes import LONG, ClientRuntimes

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""The unit of ``ru_maxrss``: bytes on macOS, kilobytes elsewhere."""


class TimedTransport:
    """A transport that measures client and server time.

    Server time runs from a received message to ``served()``, without the time spent sending. GPU work is asynchronous, so on a
    GPU only the time to queue the server's work is measured.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._received_at = time.perf_counter()
        self._sending_s = 0.0
        self.clients_s = 0.0
        self.server_s = 0.0

    @property
    def now(self) -> float:
        return self._transport.now

    def send(self, dispatch: Dispatch) -> None:
        began = time.perf_counter()
        self._transport.send(dispatch)
        self._sending_s += time.perf_counter() - began

    def receive(self) -> Message:
        began = time.perf_counter()
        message = self._transport.receive()
        self._received_at = time.perf_counter()
        self.clients_s += self._received_at - began + self._sending_s
        self._sending_s = 0.0
        return message

    def served(self) -> None:
        """Note that the server has processed the last message."""
        self.server_s += time.perf_counter() - self._received_at - self._sending_s

    def spent(self) -> dict[str, float]:
        return {"clients_s": self.clients_s, "server_s": self.server_s}

    def restore(self, spent: Mapping[str, float]) -> None:
        self.clients_s, self.server_s = spent["clients_s"], spent["server_s"]

    def costs(self) -> dict[str, float]:
        """Seconds so far, and this process's peak memory."""
        return {name: round(value, 3) for name, value in self.spent().items()} | _memory()


def _memory() -> dict[str, float]:
    """This process's peak memory. Empty on Windows, which has no ``resource`` module."""
    try:
        import resource
    except ImportError:
        return {}
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}


def straggler_shares(task: Task, runtimes: ClientRuntimes) -> dict[int, float]:
    """Return each class's share of the Long clients' examples. Empty without label counts or Long clients."""
    clients, totals = range(task.num_clients), Counter[int]()
    if not counts_labels(task) or len(clients) > MOST_LISTED:
        return {}
    for client in clients:
        if runtimes.class_of(client) == LONG:
            totals.update(task.label_counts(client))
    return {label: number / totals.total() for label, number in totals.items()}


def straggler_accuracy(scores: Mapping[str, float], shares: Mapping[int, float]) -> dict[str, float]:
    """Return the accuracy on the slow clients' classes, weighted by their examples, if the scores have these classes."""
    by_class = {label: scores.get(f"{OF_CLASS}{label}") for label in shares}
    known = {label: value for label, value in by_class.items() if value is not None}
    return {STRAGGLER_ACCURACY: sum(shares[label] * known[label] for label in known)} if shares and known == by_class else {}


@dataclass
class Evaluator:
    """Evaluates a simulation's current model and reports progress to ``watch`` if it is an ``EvaluationWatch``."""

    simulation: Simulation
    watch: Watch | None
    stop: Callable[[], bool]
    interrupted: bool = False
    """The newest version has not been evaluated yet; this is made up for when the run is resumed."""

    def is_due(self, version: int) -> bool:
        experiment = self.simulation.experiment
        return version % experiment.eval_every == 0 or version == experiment.num_versions

    def scores(self) -> dict[str, float] | None:
        """Evaluate the current model. None if a stop was requested meanwhile. A NaN loss aborts the run."""
        self.interrupted = True
        try:
            with progress_callback(self._at):
                scores = self.simulation.evaluate()
        except Stopped:
            return None
        self.interrupted = False
        if "accuracy" not in scores:
            raise ConfigError(f"the task's evaluate() must return an accuracy; it returned {', '.join(scores) or 'nothing'}")
        check_scores(self.simulation.server.model.version, scores)
        return scores | straggler_accuracy(scores, self._straggler_shares)

    @cached_property
    def _straggler_shares(self) -> dict[int, float]:
        return straggler_shares(self.simulation.experiment.task, self.simulation.runtimes)

    def report_late(self, version: int, now: float, scores: dict[str, float] | None) -> None:
        """Report an evaluation that was interrupted and has been made up for."""
        if scores is not None and isinstance(self.watch, EvaluationWatch):
            self.watch.late_evaluation(version, now, scores)

    def _at(self, done: int, total: int) -> None:
        if isinstance(self.watch, EvaluationWatch):
            self.watch.evaluating(done, total)
        if self.stop():
            raise Stopped

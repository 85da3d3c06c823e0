"""Counters of a run: staleness for the summary, the state shown while it runs, and the conditions that abort it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedecho.core.admission import NOT_FINITE
from fedecho.core.loop import Moment
from fedecho.core.server import Receipt
from fedecho.core.types import CLIENT_FAILED
from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import Experiment
from fedecho.runs.record import RECORD, JsonObject, read_header, read_record, rounded
from fedecho.simulation.forecast import stall_limit


@dataclass
class StalenessCounter:
    """The mean and maximum staleness of accepted updates."""

    accepted: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def see(self, receipt: Receipt) -> None:
        if receipt.status == "accepted":
            self.accepted += 1
            self.staleness_sum += receipt.staleness
            self.staleness_max = max(self.staleness_max, receipt.staleness)

    def summary_fields(self) -> dict[str, Any]:
        return {"mean_staleness": self.staleness_sum / self.accepted, "max_staleness": self.staleness_max}

    def to_tree(self) -> dict[str, int]:
        return asdict(self)


MAX_REFUSED = 100
PER_ACCEPTED = 9
"""Rejected updates that one accepted update makes up for."""
PER_ACCEPTED_NOT_FINITE = 2
"""The same for non-finite updates: if most clients send them, the model itself has diverged."""


ALIKE, ALIKE_EACH = 10, 2
"""Consecutive failures of one kind that abort a deployed run: in total, and of each connected client."""
MOST_FAILED = 100
"""Consecutive failures of any kind that abort a deployed run, with at least one of each connected client."""


class DivergedError(ConfigError):
    """Training has diverged: over 9 in 10 updates are rejected, over 2 in 3 are not finite, or the model's loss is NaN."""


def check_scores(version: int, scores: Mapping[str, Any]) -> None:
    """Abort if a loss or accuracy is NaN: the model has diverged even if its weights are finite. Other scores may be NaN."""
    for name, value in scores.items():
        if name.endswith(("loss", "accuracy")) and isinstance(value, float) and isnan(value):
            raise DivergedError(
                f"training has diverged: the evaluation of version {version} gave {name} = nan; "
                "lower local.client_lr or algorithm.server_lr"
            )


class StallGuard:
    """Aborts a run if too many updates are rejected, or if no update is accepted for too long."""

    def __init__(self, experiment: Experiment) -> None:
        self.refused = self.not_finite = self.fruitless = 0
        self._most_fruitless = stall_limit(experiment.task.num_clients)
        self._most_refused = max(MAX_REFUSED, 10 * experiment.concurrency)

    def see(self, receipt: Receipt) -> None:
        self.fruitless = 0 if receipt.status == "accepted" else self.fruitless + 1
        if self.fruitless > self._most_fruitless:
            raise ConfigError(
                f"no update in the last {self.fruitless} messages: clients are lost before they finish; check [faults]"
            )
        if receipt.status == "accepted":
            self.refused = max(0, self.refused - PER_ACCEPTED)
            self.not_finite = max(0, self.not_finite - PER_ACCEPTED_NOT_FINITE)
        self.refused += receipt.status == "rejected"
        self.not_finite += receipt.code == NOT_FINITE
        if max(self.refused, self.not_finite) >= self._most_refused:
            raise DivergedError(
                f"most of the last updates were rejected, the last one because {receipt.reason}; if training has diverged, "
                "lower local.client_lr or algorithm.server_lr"
            )


class FailureGuard:
    """Aborts a deployed run in which every connected client fails. Clients that may still answer are waited for.

    A few failures of one kind are enough if the clients cause them: a rejected update, or an error in the client app. Lost
    connections and missed deadlines may be temporary, so many more of those are tolerated.
    """

    def __init__(self) -> None:
        self._failed, self._own = Counter[int](), Counter[int]()
        """Failures per client since the last accepted update: all of them, and those that the client caused."""
        self._codes = set[str]()

    def see(self, receipt: Receipt, present: Set[int]) -> None:
        if receipt.status == "accepted":
            for counter in (self._failed, self._own, self._codes):
                counter.clear()
        elif receipt.status in ("rejected", "lost"):
            self._failed[receipt.client] += 1
            if receipt.status == "rejected" or receipt.code == CLIENT_FAILED:
                self._own[receipt.client] += 1
                self._codes.add(receipt.code)
            self._check(receipt, present)

    def _check(self, last: Receipt, present: Set[int]) -> None:
        num = self._failed.total()
        if len(self._codes) == 1 and _all_have(self._own, present, ALIKE_EACH, ALIKE):
            raise ConfigError(
                f"none of the last {num} jobs returned an update: every connected client failed in the same way "
                f"({last.code}); the last one: {last.reason}"
            )
        if _all_have(self._failed, present, 1, MOST_FAILED):
            raise ConfigError(f"none of the last {num} jobs returned an update; the last one: {last.reason}")


def _all_have(failed: Counter[int], present: Set[int], each: int, in_all: int) -> bool:
    return failed.total() >= in_all and bool(present) and all(failed[client] >= each for client in present)


Watch = Callable[[Moment, dict[str, float] | None], None]
"""A callback for every moment of a run, with the scores if the model was evaluated."""


@runtime_checkable
class EvaluationWatch(Protocol):
    """A watch that also follows evaluations."""

    def evaluating(self, done: int, total: int) -> None:
        """An evaluation is in progress: ``done`` of ``total`` examples."""

    def late_evaluation(self, version: int, now: float, scores: dict[str, float]) -> None:
        """An evaluation that was interrupted when the run was stopped has been made up for."""


LONG_S = 1.0
"""The progress of evaluations is shown after this many seconds."""


@dataclass
class RunState:
    """The state of a run that is shown to people. It is small, because it is sent through a pipe in a comparison."""

    num_versions: int
    version: int = 0
    time: float = 0.0
    accuracy: float | None = None
    best: float | None = None
    staleness_sum: int = 0
    accepted: int = 0
    rejected: int = 0
    lost: int = 0
    by_class: Counter[str] = field(default_factory=Counter)
    evaluated: str = ""
    """The progress of the current evaluation."""

    def see(self, moment: Moment, scores: dict[str, float] | None, runtime_class: str = "") -> None:
        self.time, self.evaluated = moment.time, ""
        self._count(moment.receipt.status, moment.receipt.staleness, runtime_class)
        if moment.step is not None:
            self.version = moment.step.model.version
        if scores is not None:
            self._score(scores.get("accuracy"))

    def late_evaluation(self, version: int, now: float, scores: dict[str, float]) -> None:
        self.version, self.time, self.evaluated = version, now, ""
        self._score(scores.get("accuracy"))

    def recall(self, line: JsonObject) -> None:
        """Count a line of the record from before the run was stopped."""
        if line["event"] == "arrival":
            self._count(line["status"], line.get("staleness", 0), line.get("class", ""))
        elif line["event"] == "evaluation":
            self._score(line.get("accuracy"))

    def _count(self, status: str, staleness: int, runtime_class: str) -> None:
        if status == "accepted":
            self.accepted += 1
            self.staleness_sum += staleness
            if runtime_class:
                self.by_class[runtime_class] += 1
        self.rejected += status == "rejected"
        self.lost += status == "lost"

    def _score(self, accuracy: float | None) -> None:
        self.accuracy = accuracy
        self.best = max(accuracy or 0.0, self.best or 0.0)

    @property
    def done(self) -> bool:
        return self.version >= self.num_versions

    @property
    def text(self) -> str:
        accuracy = "" if self.accuracy is None else f"accuracy {100 * self.accuracy:5.1f} %"
        staleness = f"staleness {self.staleness_sum / max(self.accepted, 1):4.1f}"
        faults = "".join(f"  {name} {count}" for name, count in (("rejected", self.rejected), ("lost", self.lost)) if count)
        return f"{accuracy}  clock {clock(self.time)}  {staleness}{faults}{self.evaluated}"

    @property
    def arrivals(self) -> str:
        """The number of updates from each runtime class."""
        names = sorted(self.by_class, key=lambda name: ORDER.index(name) if name in ORDER else 9)
        return "  ".join(f"{name} {self.by_class[name]}" for name in names)


ORDER = ("short", "medium", "long")


def clock(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:5.1f} min"
    return f"{seconds / 3600:6.2f} h"


def _is_of(line: JsonObject, moment: Moment) -> bool:
    receipt = moment.receipt
    key = (line["event"], line.get("dispatch", -1), line.get("client"), line.get("time"))
    return key == ("arrival", receipt.dispatch, receipt.client, rounded(moment.time))


class ProgressWatch:
    """A watch that updates a ``RunState`` and passes it to ``show``. The runtime classes come from the run's header.

    The past of a resumed run comes from its record, which has only a part of it if it is sampled (``record_every``).
    """

    def __init__(self, folder: Path, state: RunState, show: Callable[[RunState], None], also: Watch | None = None) -> None:
        """``also`` is another watch, which is called first."""
        self.state = state
        self._also = also
        self._folder = folder
        self._show = show
        self._classes: Sequence[str] | None = None
        self._evaluating_since = 0.0

    def evaluating(self, done: int, total: int) -> None:
        """Show the progress of an evaluation, unless it is short."""
        now = time.monotonic()
        self._evaluating_since = now if done == 0 else self._evaluating_since
        if now - self._evaluating_since >= LONG_S:
            self._recall()
            self.state.evaluated = f"  evaluating {done}/{total}"
            self._show(self.state)

    def late_evaluation(self, version: int, now: float, scores: dict[str, float]) -> None:
        if isinstance(self._also, EvaluationWatch):
            self._also.late_evaluation(version, now, scores)
        self._recall()
        self.state.late_evaluation(version, now, scores)
        self._show(self.state)

    def __call__(self, moment: Moment, scores: dict[str, float] | None) -> None:
        if self._also is not None:
            self._also(moment, scores)
        classes, client = self._recall(moment), moment.receipt.client
        self.state.see(moment, scores, classes[client] if 0 <= client < len(classes) else "")
        self._show(self.state)

    def _recall(self, moment: Moment | None = None) -> Sequence[str]:
        """Return the clients' runtime classes. The first call also counts the past, except the line of ``moment``."""
        if self._classes is None:
            if not (self._folder / RECORD).exists():  # an untrained model is evaluated without a run
                return ()
            self._classes = (read_header(self._folder).get("clients") or {}).get("classes", ())
            for line in read_record(self._folder):
                if moment is None or not _is_of(line, moment):
                    self.state.recall(line)
        return self._classes

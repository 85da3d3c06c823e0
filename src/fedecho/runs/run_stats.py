"""Counters of a run: what the summary reports, what people watch, and when a run is given up."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import isnan
from pathlib import Path
from typing import Any

from fedecho.core.admission import NOT_FINITE
from fedecho.core.loop import Moment
from fedecho.core.server import Receipt
from fedecho.core.types import CLIENT_FAILED
from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import Experiment
from fedecho.runs.record import RECORD, Line, read_header, read_record, rounded
from fedecho.simulation.forecast import most_fruitless


class Tally:
    """The staleness of accepted updates."""

    def __init__(self) -> None:
        self.accepted = self.staleness_sum = self.staleness_max = 0

    def see(self, receipt: Receipt) -> None:
        if receipt.status == "accepted":
            self._count(receipt.staleness)

    def _count(self, staleness: int) -> None:
        self.accepted += 1
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)

    def staleness(self) -> dict[str, Any]:
        return {"mean_staleness": self.staleness_sum / self.accepted, "max_staleness": self.staleness_max}

    def to_tree(self) -> dict[str, int]:
        return {"accepted": self.accepted, "staleness_sum": self.staleness_sum, "staleness_max": self.staleness_max}

    def from_tree(self, tree: Mapping[str, int]) -> "Tally":
        self.accepted, self.staleness_sum = tree["accepted"], tree["staleness_sum"]
        self.staleness_max = tree["staleness_max"]
        return self

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "Tally":
        """Of a whole record, for a checkpoint from before there were tallies."""
        tally = cls()
        for line in lines:
            if line.get("status") == "accepted":
                tally._count(line["staleness"])
        return tally


MAX_REFUSED = 100
PER_ACCEPTED = 9
"""Refused updates that one accepted update makes up for."""
PER_ACCEPTED_NOT_FINITE = 2
"""The same for updates that are not finite: where most clients send such, it is the model that is lost."""


ALIKE, ALIKE_EACH = 10, 2
"""Failures of one kind in a row that end a deployed run: in all, and of every client that is connected."""
MOST_FAILED = 100
"""The same for failures of any kinds, of which each connected client has at least one."""


class DivergedError(ConfigError):
    """More than nine in ten updates are refused, more than two in three are not finite, or the model's loss is not a number."""


def check_scores(version: int, scores: Mapping[str, Any]) -> None:
    """A model whose loss or accuracy is NaN has diverged, though its weights may all be finite. Other scores may be undefined."""
    for name, value in scores.items():
        if name.endswith(("loss", "accuracy")) and isinstance(value, float) and isnan(value):
            raise DivergedError(
                f"training has diverged: the evaluation of version {version} gave {name} = nan; "
                "lower local.client_lr or algorithm.server_lr"
            )


class Standstill:
    """Counts the updates refused beyond what the accepted ones make up for, and the messages since the last accepted one."""

    def __init__(self, experiment: Experiment) -> None:
        self.refused = self.not_finite = self.fruitless = 0
        self._most_fruitless = most_fruitless(experiment.task.num_clients)
        self._most_refused = max(MAX_REFUSED, 10 * experiment.concurrency)

    def see(self, receipt: Receipt) -> None:
        self.fruitless = 0 if receipt.status == "accepted" else self.fruitless + 1
        if self.fruitless > self._most_fruitless:
            raise ConfigError(
                f"not one update in the last {self.fruitless} messages: clients are lost before they finish; see [faults]"
            )
        if receipt.status == "accepted":
            self.refused = max(0, self.refused - PER_ACCEPTED)
            self.not_finite = max(0, self.not_finite - PER_ACCEPTED_NOT_FINITE)
        self.refused += receipt.status == "rejected"
        self.not_finite += receipt.code == NOT_FINITE
        if max(self.refused, self.not_finite) >= self._most_refused:
            raise DivergedError(
                f"most of the last updates were rejected, the last one because {receipt.reason}: if training has diverged, "
                "lower local.client_lr or algorithm.server_lr"
            )


class Failures:
    """Ends a deployed run in which every connected client fails. A client that might still answer is waited for.

    A few failures of one kind end it if they are the clients' own: a refused update or an app that raised. Lost connections,
    missed deadlines and the like pass, so of those it takes many more.
    """

    def __init__(self) -> None:
        self._failed, self._own = Counter[int](), Counter[int]()
        """By client, since the last accepted update: all failures, and those that are the client's own."""
        self._codes = set[str]()

    def see(self, receipt: Receipt, present: Set[int]) -> None:
        if receipt.status == "accepted":
            for seen in (self._failed, self._own, self._codes):
                seen.clear()
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
                f"not one of the last {num} jobs gave an update: every connected client failed in the same way "
                f"({last.code}); the last one: {last.reason}"
            )
        if _all_have(self._failed, present, 1, MOST_FAILED):
            raise ConfigError(f"not one of the last {num} jobs gave an update; the last one: {last.reason}")


def _all_have(failed: Counter[int], present: Set[int], each: int, in_all: int) -> bool:
    return failed.total() >= in_all and bool(present) and all(failed[client] >= each for client in present)


Watch = Callable[[Moment, dict[str, float] | None], None]
"""Told of every moment, and of the scores where there was an evaluation."""


LONG_S = 1.0
"""From so many seconds on an evaluation is long."""


class RunState:
    """Small and plain: it goes through a pipe in a comparison."""

    def __init__(self, num_versions: int, version: int = 0) -> None:
        self.num_versions = num_versions
        self.version = version
        self.time = 0.0
        self.accuracy: float | None = None
        self.best: float | None = None
        self.staleness_sum = 0
        self.accepted = 0
        self.rejected = 0
        self.lost = 0
        self.by_class: dict[str, int] = {}
        self.evaluated = ""
        """How far an evaluation is that goes on."""

    def see(self, moment: Moment, scores: dict[str, float] | None, kind: str = "") -> None:
        """``kind`` is the runtime class of the client, where it is known."""
        self.time, self.evaluated = moment.time, ""
        self._count(moment.receipt.status, moment.receipt.staleness, kind)
        if moment.step is not None:
            self.version = moment.step.model.version
        if scores is not None:
            self._judge(scores.get("accuracy"))

    def judged(self, version: int, now: float, scores: dict[str, float]) -> None:
        self.version, self.time, self.evaluated = version, now, ""
        self._judge(scores.get("accuracy"))

    def recall(self, line: Line) -> None:
        """What a record tells of before the run was stopped."""
        if line["event"] == "arrival":
            self._count(line["status"], line.get("staleness", 0), line.get("class", ""))
        elif line["event"] == "evaluation":
            self._judge(line.get("accuracy"))

    def _count(self, status: str, staleness: int, kind: str) -> None:
        if status == "accepted":
            self.accepted += 1
            self.staleness_sum += staleness
            if kind:
                self.by_class[kind] = self.by_class.get(kind, 0) + 1
        self.rejected += status == "rejected"
        self.lost += status == "lost"

    def _judge(self, accuracy: float | None) -> None:
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
        """How many updates came from which class of clients."""
        known = sorted(self.by_class, key=lambda kind: ORDER.index(kind) if kind in ORDER else 9)
        return "  ".join(f"{kind} {self.by_class[kind]}" for kind in known)


ORDER = ("short", "medium", "long")


def clock(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:5.1f} min"
    return f"{seconds / 3600:6.2f} h"


def _tells_of(moment: Moment, line: Line) -> bool:
    receipt = moment.receipt
    one = (line["event"], line.get("dispatch", -1), line.get("client"), line.get("time"))
    return one == ("arrival", receipt.dispatch, receipt.client, rounded(moment.time))


class Following:
    """A watch that keeps a state up to date and passes it on. Who is of which class stands in the run's own header.

    A run that goes on has a past, which stands in its record; in a sampled one (``record_every``) a part of it.
    """

    def __init__(self, folder: Path, state: RunState, tell: Callable[[RunState], None], also: Watch | None = None) -> None:
        """``also`` is told of every moment first."""
        self.state = state
        self._also = also
        self._folder = folder
        self._tell = tell
        self._classes: Sequence[str] | None = None
        self._evaluating_since = 0.0

    def evaluating(self, done: int, total: int) -> None:
        """An evaluation goes on; of a short one nothing is said."""
        now = time.monotonic()
        self._evaluating_since = now if done == 0 else self._evaluating_since
        if now - self._evaluating_since >= LONG_S:
            self._recall()
            self.state.evaluated = f"  evaluating {done}/{total}"
            self._tell(self.state)

    def judged(self, version: int, now: float, scores: dict[str, float]) -> None:
        """What was broken off when the run was stopped has been made up for."""
        getattr(self._also, "judged", lambda version, now, scores: None)(version, now, scores)
        self._recall()
        self.state.judged(version, now, scores)
        self._tell(self.state)

    def __call__(self, moment: Moment, scores: dict[str, float] | None) -> None:
        if self._also is not None:
            self._also(moment, scores)
        classes, client = self._recall(moment), moment.receipt.client
        self.state.see(moment, scores, classes[client] if 0 <= client < len(classes) else "")
        self._tell(self.state)

    def _recall(self, moment: Moment | None = None) -> Sequence[str]:
        """The classes of the clients; the first time, the past too, of which ``moment`` may be a part already."""
        if self._classes is None and not (self._folder / RECORD).exists():  # nothing runs: a model is judged as it is
            return ()
        if self._classes is None:
            self._classes = (read_header(self._folder).get("clients") or {}).get("classes", ())
            for line in read_record(self._folder):
                if moment is None or not _tells_of(moment, line):
                    self.state.recall(line)
        return self._classes

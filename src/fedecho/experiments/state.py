"""The figures of a run that people watch while it goes on."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedecho.core.drive import Moment
from fedecho.experiments.record import RECORD, Line, read_header, read_record, rounded

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

"""Run folders as arrays: what every figure is made from. A run may be finished, stopped or going on."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedecho.report.spec import Floats, Ints
from fedecho.runs.identity import is_finished
from fedecho.runs.record import RECORD, Line, read_header, read_record
from fedecho.runs.record_schema import Clients, Header
from fedecho.runs.summary import Summary

STATUSES = ("accepted", "rejected", "lost")
LAST = 10


@dataclass(frozen=True)
class Jobs:
    """Messages about jobs, one entry each, in the order of their arrival. ``kind`` is a place among ``kinds``, runtime classes."""

    time: Floats
    client: Ints
    status: Ints
    number: Ints
    base: Ints
    staleness: Ints
    kind: Ints
    kinds: tuple[str, ...]

    @property
    def accepted(self) -> NDArray[np.bool_]:
        return np.equal(self.status, 0)


@dataclass(frozen=True)
class Dispatches:
    """Who was given which version when; empty in records of before there were such lines."""

    time: Floats
    client: Ints
    number: Ints
    base: Ints


@dataclass(frozen=True)
class RunData:
    folder: Path
    header: Header
    summary: Summary | None
    evaluations: list[Line]
    versions: list[Line]
    jobs: Jobs
    dispatches: Dispatches
    reasons: dict[str, int]

    @property
    def seed(self) -> int:
        return self.header["seed"]

    @property
    def algorithm(self) -> str:
        told = self.header.get("algorithm") or (self.summary.algorithm if self.summary else "")
        method = (self.header["config"] or {}).get("algorithm")
        return told or str(method.get("name", self.folder.name) if isinstance(method, dict) else self.folder.name)

    @property
    def version(self) -> int:
        """How far it has come."""
        return max((int(line["version"]) for line in (*self.versions[-1:], *self.evaluations[-1:])), default=0)

    @property
    def clock(self) -> str:
        """What ``time`` is: virtual in a simulation; the header of a deployed run may say real."""
        return self.header.get("clock", "virtual")

    @property
    def notes(self) -> dict[str, str]:
        """What the task wants said beside its numbers."""
        return {str(name): str(text) for name, text in (self.header.get("notes") or {}).items()}

    @property
    def every(self) -> int:
        """The record has every so many jobs."""
        return self.header.get("record_every", 1)

    @property
    def sampled(self) -> str:
        """What to say beside figures of single jobs; empty of a whole record."""
        return f" The record is a sample: one job in {self.every:,}." if self.every > 1 else ""

    def count(self, status: str) -> int:
        """How many jobs came to that; where the record is a sample, as the summary says, and before there is one, by the sample."""
        if self.every > 1 and self.summary is not None:
            return {"accepted": self.summary.accepted, "rejected": self.summary.rejected, "lost": self.summary.lost}[status]
        return self.every * int((self.jobs.status == STATUSES.index(status)).sum())

    @property
    def mean_staleness(self) -> float | None:
        if self.every > 1 and self.summary is not None:
            return self.summary.mean_staleness
        return float(self.jobs.staleness[self.jobs.accepted].mean()) if self.jobs.accepted.any() else None

    @property
    def clients(self) -> Clients:
        return self.header.get("clients") or {}

    @property
    def examples(self) -> Ints:
        return np.array(self.clients.get("examples", []), dtype=np.int64)

    @property
    def classes(self) -> list[str]:
        """The runtime class of every client."""
        return list(self.clients.get("classes", []))

    @property
    def num_clients(self) -> int:
        seen = max(int(column.client.max(initial=-1)) for column in (self.jobs, self.dispatches))
        return max(_num_told(self.clients), seen + 1)

    @cached_property
    def labels(self) -> Floats | None:
        """Examples by client and label, or None of a run that does not say."""
        told = self.clients.get("labels")
        if not told:
            return None
        width = 1 + max((int(label) for counts in told for label in counts), default=0)
        table = np.zeros((len(told), max(width, self.num_labels)))
        for client, counts in enumerate(told):
            for label, count in counts.items():
                table[client, int(label)] = count
        return table

    @property
    def num_labels(self) -> int:
        return len(self.evaluations[-1].get("per_class", ())) if self.evaluations else 0

    @cached_property
    def per_class(self) -> Floats | None:
        """Accuracy by evaluation and class."""
        found = [line["per_class"] for line in self.evaluations if "per_class" in line]
        if len(sizes := {len(each) for each in found}) > 1:
            raise ValueError(
                f"{self.folder / RECORD}: per_class has {min(sizes)} entries in one evaluation and {max(sizes)} in another; "
                "the record is damaged or of another program"
            )
        return np.array(found) if found and len(found) == len(self.evaluations) else None

    def column(self, name: str) -> Floats:
        """A number of all evaluations; NaN where there is none."""
        return np.array([line.get(name, np.nan) for line in self.evaluations], dtype=np.float64)

    def metric(self, name: str) -> tuple[Floats, Floats]:
        """(version, value) of a number that the method reported with its versions."""
        found = [(line["version"], line[name]) for line in self.versions if name in line]
        table = np.array(found, dtype=np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    @cached_property
    def schedule(self) -> bytes:
        """Equal for runs in which the same clients came at the same times."""
        jobs = self.jobs
        return jobs.time.tobytes() + jobs.client.tobytes() + jobs.base.tobytes() + jobs.status.tobytes()


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The run folders among ``places`` and below them, each once under whichever name it is given first."""
    found: dict[Path, Path] = {}
    for place in places:
        if not place.exists():
            raise ValueError(f"there is no folder {place}; `fedecho run digits --out {place}` would make one")
        inside = [place] if (place / RECORD).is_file() else sorted(path.parent for path in place.rglob(RECORD))
        if not inside:
            raise ValueError(f"{place} holds no run (there is no {RECORD} in it or below it)")
        for folder in inside:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def read_run(folder: Path) -> RunData:
    header = read_header(folder)
    summary = Summary.read(folder) if is_finished(folder) else None
    jobs, sent = _Table("dqqqqqq"), _Table("dqqq")
    versions: list[Line] = []
    evaluations: list[Line] = []
    kinds: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for line in read_record(folder):
        event, status = line.get("event"), line.get("status")
        if event == "dispatch":
            sent.add(line["time"], line["client"], line["dispatch"], line["base"])
        elif event == "arrival" and status in STATUSES:
            code = line.get("code") or line.get("reason")  # records of before have no codes
            if code:
                reasons[code] = reasons.get(code, 0) + 1
            if "dispatch" in line:
                kind = kinds.setdefault(line.get("class", ""), len(kinds))
                known = (line["dispatch"], line["base"], line["staleness"])
                jobs.add(line["time"], line["client"], STATUSES.index(status), *known, kind)
        elif event == "version":
            versions.append(line)
        elif event == "evaluation":
            evaluations.append(line)
    if "record_every" in header and summary is not None:
        reasons = dict(summary.reasons)  # of all jobs, where the record has a sample
    time, client, came_to, number, base, staleness, kind_of = jobs.columns()
    dispatches = Dispatches(*sent.columns())
    last = max(int(column.max(initial=-1)) for column in (client, dispatches.client))
    if 0 < (told := _num_told(header.get("clients") or {})) <= last:
        raise ValueError(
            f"{folder / RECORD} has a job of client {last} in a run of {told} clients; it is damaged or of another program"
        )
    return RunData(
        folder=folder,
        header=header,
        summary=summary,
        evaluations=evaluations,
        versions=versions,
        jobs=Jobs(time, client, came_to, number, base, staleness, kind_of, tuple(kinds)),
        dispatches=dispatches,
        reasons=reasons,
    )


def _num_told(clients: Clients) -> int:
    """How many clients the header names; 0 where it names none."""
    return max(clients.get("num_clients", 0), len(clients.get("examples", ())), len(clients.get("labels", ())))


class _Table:
    """Columns of numbers that grow line by line: a record of millions of jobs is never held as objects."""

    def __init__(self, types: str) -> None:
        self._columns: list[array[Any]] = [array(each) for each in types]

    def add(self, *values: float) -> None:
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def columns(self) -> list[Any]:
        return [np.array(column, dtype=column.typecode) for column in self._columns]

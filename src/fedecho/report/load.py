"""Reads run folders into arrays. A run may be finished, stopped or still running."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedecho.report.spec import Floats, Ints
from fedecho.runs.record import RECORD, JsonObject, read_header, read_record
from fedecho.runs.record_schema import Clients, Header
from fedecho.runs.summary import SUMMARY, Summary

STATUSES = ("accepted", "rejected", "lost")
LAST = 10


@dataclass(frozen=True)
class Jobs:
    """Arrivals in order, one entry per job. ``kind`` is an index into ``kinds``, the runtime classes."""

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
    """Dispatched jobs: the time, client, job number and base version of each."""

    time: Floats
    client: Ints
    number: Ints
    base: Ints


@dataclass(frozen=True)
class RunData:
    folder: Path
    header: Header
    summary: Summary | None
    evaluations: list[JsonObject]
    versions: list[JsonObject]
    jobs: Jobs
    dispatches: Dispatches
    reasons: dict[str, int]
    advice: tuple[str, ...] = ()
    """What the run advised its user to change."""

    @property
    def seed(self) -> int:
        return self.header["seed"]

    @property
    def algorithm(self) -> str:
        name = self.header.get("algorithm") or (self.summary.algorithm if self.summary else "")
        method = (self.header["config"] or {}).get("algorithm")
        return name or str(method.get("name", self.folder.name) if isinstance(method, dict) else self.folder.name)

    @property
    def version(self) -> int:
        """The latest version in the record."""
        return max((int(line["version"]) for line in (*self.versions[-1:], *self.evaluations[-1:])), default=0)

    @property
    def clock(self) -> str:
        """``virtual`` for a simulation, ``real`` for a deployed run: the clock behind ``time``."""
        return self.header.get("clock", "virtual")

    @property
    def notes(self) -> dict[str, str]:
        """The task's notes on how to read its scores."""
        return {str(name): str(text) for name, text in (self.header.get("notes") or {}).items()}

    @property
    def record_every(self) -> int:
        """The record holds one job in this many."""
        return self.header.get("record_every", 1)

    @property
    def sampling_note(self) -> str:
        """A sentence for captions of figures of single jobs; empty if the record is complete."""
        return f" The record is a sample of one job in {self.record_every:,}." if self.record_every > 1 else ""

    def count(self, status: str) -> int:
        """The number of jobs with this status. For a sampled record: the summary's count, or an estimate from the sample."""
        if self.record_every > 1 and self.summary is not None:
            return {"accepted": self.summary.accepted, "rejected": self.summary.rejected, "lost": self.summary.lost}[status]
        return self.record_every * int((self.jobs.status == STATUSES.index(status)).sum())

    @property
    def mean_staleness(self) -> float | None:
        if self.record_every > 1 and self.summary is not None:
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
        return max(_num_clients(self.clients), seen + 1)

    @cached_property
    def labels(self) -> Floats | None:
        """The number of examples by client and label; None if the record has no label counts."""
        label_counts = self.clients.get("labels")
        if not label_counts:
            return None
        width = 1 + max((int(label) for counts in label_counts for label in counts), default=0)
        table = np.zeros((len(label_counts), max(width, self.num_labels)))
        for client, counts in enumerate(label_counts):
            for label, count in counts.items():
                table[client, int(label)] = count
        return table

    @property
    def num_labels(self) -> int:
        return len(self.evaluations[-1].get("per_class", ())) if self.evaluations else 0

    @cached_property
    def per_class(self) -> Floats | None:
        """Accuracy by evaluation and class."""
        _, table = self._table("per_class", "evaluation", self.evaluations)
        return table if len(table) and len(table) == len(self.evaluations) else None

    @cached_property
    def coverage(self) -> tuple[Floats, Floats]:
        """The versions with a coverage, and the number of clients with evidence by version and class."""
        return self._table("teacher_coverage", "version", self.versions)

    def _table(self, name: str, event: str, lines: list[JsonObject]) -> tuple[Floats, Floats]:
        """The versions of the lines that have this list, and the lists as a table."""
        rows = [line[name] for line in lines if name in line]
        if len(sizes := {len(row) for row in rows}) > 1:
            raise ValueError(
                f"{self.folder / RECORD}: {name} has {min(sizes)} entries in one {event} and {max(sizes)} in another; "
                "the record is damaged or was written by another program"
            )
        versions = [line["version"] for line in lines if name in line]
        return np.array(versions, dtype=np.float64), np.array(rows, dtype=np.float64)

    def column(self, name: str) -> Floats:
        """A value of each evaluation; NaN where it is missing."""
        return np.array([line.get(name, np.nan) for line in self.evaluations], dtype=np.float64)

    def metric(self, name: str) -> tuple[Floats, Floats]:
        """The versions and values of a metric that the method reports at each version."""
        pairs = [(line["version"], line[name]) for line in self.versions if name in line]
        table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    @cached_property
    def schedule(self) -> bytes:
        """A key that is equal for runs in which the same clients report at the same times."""
        jobs = self.jobs
        return jobs.time.tobytes() + jobs.client.tobytes() + jobs.base.tobytes() + jobs.status.tobytes()


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The run folders among ``places`` and below them, without duplicates, under the name given first."""
    run_folders: dict[Path, Path] = {}
    for place in places:
        if not place.exists():
            raise ValueError(f"{place} does not exist; create a run there with `fedecho run digits --out {place}`")
        inside = [place] if (place / RECORD).is_file() else sorted(path.parent for path in place.rglob(RECORD))
        if not inside:
            raise ValueError(f"{place} holds no run: there is no {RECORD} in it or below it")
        for folder in inside:
            run_folders.setdefault(folder.resolve(), folder)
    return list(run_folders.values())


def read_run(folder: Path) -> RunData:
    header = read_header(folder)
    summary = Summary.read(folder) if (folder / SUMMARY).exists() else None
    jobs, sent = _Columns("dqqqqqq"), _Columns("dqqq")
    versions: list[JsonObject] = []
    evaluations: list[JsonObject] = []
    kinds: dict[str, int] = {}
    reasons: dict[str, int] = {}
    advice: list[str] = []
    for line in read_record(folder):
        event, status = line.get("event"), line.get("status")
        if event == "dispatch":
            sent.add(line["time"], line["client"], line["dispatch"], line["base"])
        elif event == "arrival" and status in STATUSES:
            if code := line.get("code"):
                reasons[code] = reasons.get(code, 0) + 1
            if "dispatch" in line:
                kind = kinds.setdefault(line.get("class", ""), len(kinds))
                job = (line["dispatch"], line["base"], line["staleness"])
                jobs.add(line["time"], line["client"], STATUSES.index(status), *job, kind)
        elif event == "version":
            versions.append(line)
        elif event == "evaluation":
            evaluations.append(line)
        elif event == "advice":
            advice.append(line["text"])
    if "record_every" in header and summary is not None:
        reasons = dict(summary.reasons)  # counts all jobs; the record is a sample
    time, client, outcome, number, base, staleness, kind_of = jobs.columns()
    dispatches = Dispatches(*sent.columns())
    last = max(int(column.max(initial=-1)) for column in (client, dispatches.client))
    if 0 < (num_clients := _num_clients(header.get("clients") or {})) <= last:
        raise ValueError(
            f"{folder / RECORD} has a job of client {last}, but the run has only {num_clients} clients; "
            "it is damaged or was written by another program"
        )
    return RunData(
        folder=folder,
        header=header,
        summary=summary,
        evaluations=evaluations,
        versions=versions,
        jobs=Jobs(time, client, outcome, number, base, staleness, kind_of, tuple(kinds)),
        dispatches=dispatches,
        reasons=reasons,
        advice=tuple(advice),
    )


def _num_clients(clients: Clients) -> int:
    """The number of clients in the header, or 0 if it does not say."""
    return max(clients.get("num_clients", 0), len(clients.get("examples", ())), len(clients.get("labels", ())))


class _Columns:
    """Growing columns of numbers, so that a record of millions of jobs is not held as Python objects."""

    def __init__(self, types: str) -> None:
        self._columns: list[array[Any]] = [array(code) for code in types]

    def add(self, *values: float) -> None:
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def columns(self) -> list[Any]:
        return [np.array(column, dtype=column.typecode) for column in self._columns]

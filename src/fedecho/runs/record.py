"""The record of a run, ``run.jsonl``: one JSON object per line.

A header is followed by one line per dispatch, client message, version and evaluation. Only evaluations contain real time, so all
other lines are bit-identical for every executor. A sampled record (``every``) has the dispatch and the answer of every n-th
job, by dispatch number, but all versions and evaluations.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from fedecho.runs.json_types import SchemaError, loaded
from fedecho.runs.record_schema import Header, check_line
from fedecho.storage.files import DiskFullError, disk_full_at, open_own, write_atomically
from fedecho.storage.user_files import MIB

if TYPE_CHECKING:  # `fedecho report` reads records without torch
    from fedecho.core.loop import Moment
    from fedecho.core.server import Receipt

RECORD = "run.jsonl"
MOST_LINE_BYTES = 256 * MIB
OF_CLASS = "accuracy_class_"
"""Prefix of a task's scores for single classes."""
COVERAGE_OF_CLASS = "coverage_class_"
"""Prefix of FedEcho's metrics for single classes (distill/diagnostics.py)."""

REJECTED_ONLY = ("reason", "code")
"""Fields of updates that were not accepted. Client metrics with these names are not recorded."""

EVALUATION, INITIAL = "evaluation", "initial evaluation"
"""Evaluation events. The initial one is of the untrained version 0; only deployments record it."""

JsonObject = dict[str, Any]
"""One JSON object of a record, or a table of a configuration."""

ClassOf = Callable[[int], str]
"""The runtime class of a client."""


@dataclass(frozen=True, slots=True)
class RecordPosition:
    """A position in a record at which a checkpoint was made, and the sha256 of everything before it."""

    position: int
    sha256: str | None
    others: int = 0
    """Messages so far that belong to no job."""


class Record:
    """Appends lines to a run's record and keeps a running digest of it."""

    def __init__(self, file: BinaryIO, class_of: ClassOf, path: Path = Path(RECORD), every: int = 1) -> None:
        self._file = file
        self._class_of = class_of
        self._path = path
        self._every = every
        self._others = 0
        self._digest = sha256()

    @classmethod
    def in_memory(cls, class_of: ClassOf, every: int = 1) -> "Record":
        return cls(io.BytesIO(), class_of, every=every)

    @classmethod
    def new(cls, folder: Path, class_of: ClassOf, header: JsonObject, every: int = 1) -> "Record":
        line = json.dumps({"event": "header", **header}, separators=(",", ":"))
        write_atomically(folder / RECORD, line.encode() + b"\n")  # the file never exists without its header
        return cls.continued(folder, class_of, None, every)

    @classmethod
    def continued(cls, folder: Path, class_of: ClassOf, mark: RecordPosition | None, every: int = 1) -> "Record":
        """Reopen a record, truncated to ``mark`` (None: to its header). The rest of the run is replayed."""
        path = folder / RECORD
        file = open(path, "rb+", opener=open_own)  # noqa: SIM115 (Path.open has no opener; the record closes the file)
        record = cls(file, class_of, path, every)
        position = len(file.readline()) if mark is None else mark.position
        complete = record._hash_until(position)
        if mark is not None and (not complete or mark.sha256 != record._digest.hexdigest()):
            file.close()
            raise ValueError(
                f"{path} does not match its checkpoint: it is shorter or was changed; start the run in a new folder"
            )
        record._others = 0 if mark is None else mark.others
        file.truncate(position)
        file.seek(position)
        return record

    def _hash_until(self, position: int) -> bool:
        """Feed everything before ``position`` to the digest. False if the file is shorter."""
        self._file.seek(0)
        remaining = position
        while remaining and (chunk := self._file.read(min(remaining, 2**20))):
            self._digest.update(chunk)
            remaining -= len(chunk)
        return remaining == 0

    def write(self, line: JsonObject) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._digest.update(data)
        with disk_full_at(self._path):
            self._file.write(data)

    def moment(self, moment: "Moment") -> None:
        receipt = moment.receipt
        for sent in moment.sent:
            if sent.number % self._every == 0:
                line = {"event": "dispatch", "time": rounded(sent.time), "client": sent.client}
                self.write(line | {"dispatch": sent.number, "base": sent.base_version})
        if self._is_sampled(receipt):
            self.write(self._arrival(moment.time, receipt))
        if moment.step is not None:
            step = moment.step
            line = {"event": "version", "version": step.model.version, "time": rounded(moment.time)}
            coverage = [round(count) for name, count in step.metrics.items() if name.startswith(COVERAGE_OF_CLASS)]
            metrics = {name: value for name, value in step.metrics.items() if not name.startswith(COVERAGE_OF_CLASS)}
            self.write(_numbers(metrics) | line | ({"teacher_coverage": coverage} if coverage else {}))

    def _is_sampled(self, receipt: "Receipt") -> bool:
        """Is this message recorded? Every n-th dispatch has its answer, and every n-th message without a job is kept."""
        if receipt.dispatch >= 0:
            return receipt.dispatch % self._every == 0
        self._others += 1
        return (self._others - 1) % self._every == 0

    def evaluation(
        self, version: int, time: float, scores: Mapping[str, float], costs: JsonObject, event: str = EVALUATION
    ) -> JsonObject:
        """Write an evaluation's scores, with those of single classes as one list, and the measured ``costs``."""
        line: JsonObject = {"event": event, "version": version, "time": time}
        line |= {name: score for name, score in scores.items() if name not in line and not name.startswith(OF_CLASS)}
        of_class = [rounded(score, 4) for name, score in scores.items() if name.startswith(OF_CLASS)]
        if of_class:
            line["per_class"] = of_class
        line |= costs
        self.write(line)
        self.flush()
        return line

    def _arrival(self, time: float, receipt: "Receipt") -> JsonObject:
        line: JsonObject = {"event": "arrival", "time": rounded(time), "client": receipt.client, "status": receipt.status}
        if receipt.reason:
            line["reason"] = receipt.reason
        if receipt.code:
            line["code"] = receipt.code
        if receipt.dispatch >= 0:
            line |= {"dispatch": receipt.dispatch, "base": receipt.base_version, "staleness": receipt.staleness}
            line["class"] = self._class_of(receipt.client)
        if receipt.status == "accepted":
            metrics = {name: value for name, value in receipt.metrics.items() if name not in REJECTED_ONLY}
            line = _numbers(metrics) | line | {"norm": rounded(receipt.norm)}
        return line

    def sync(self) -> RecordPosition:
        """Flush everything to disk and return the current position."""
        with disk_full_at(self._path):
            self._file.flush()
            if not isinstance(self._file, io.BytesIO):
                os.fsync(self._file.fileno())
        return RecordPosition(self._file.tell(), self._digest.hexdigest(), self._others)

    def flush(self) -> None:
        with disk_full_at(self._path):
            self._file.flush()

    def close(self) -> None:
        """Close the file. A full disk is ignored: what is lost came after the last checkpoint and is replayed."""
        with suppress(DiskFullError), disk_full_at(self._path):
            self._file.close()

    def lines(self) -> Iterator[JsonObject]:
        """Iterate over all lines so far. Nothing may be written before the iteration is complete."""
        self.flush()
        end = self._file.tell()
        self._file.seek(0)
        try:
            while self._file.tell() < end:
                yield json.loads(self._file.readline())
        finally:
            self._file.seek(end)


def read_record(folder: Path, position: int = 0) -> Iterator[JsonObject]:
    """Iterate over the lines of a run's record from ``position`` on. An incomplete last line, left by a crash, is skipped."""
    path = folder / RECORD
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line.endswith(b"\n") and offset >= position:
                yield _parsed(line, path, number)
            offset += len(line)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Iterate over lines of limited length: a file that is not a record may be one huge line."""
    for number in count(1):
        line = file.readline(MOST_LINE_BYTES + 1)
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(
                f"{path}, line {number} is longer than {MOST_LINE_BYTES} bytes: it is damaged or not a FedEcho record"
            )
        if not line:
            return
        yield line


def _parsed(line: bytes, path: Path, number: int) -> JsonObject:
    try:
        parsed: JsonObject = loaded(line)
    except ValueError:
        parsed = {}
    if type(parsed) is not dict or "event" not in parsed:
        raise ValueError(f"{path}, line {number} is not a line of a run's record: it is damaged or not a FedEcho record")
    try:
        check_line(parsed)
    except SchemaError as error:
        raise ValueError(f"{path}, line {number}: {error}; the record is damaged or not a FedEcho record") from None
    return parsed


def read_header(folder: Path) -> Header:
    path = folder / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {RECORD}")
    with path.open("rb") as file:
        line = next(_lines(file, path), b"")
    header = _parsed(line, path, 1) if line.endswith(b"\n") else {}
    if header.get("event") != "header":
        raise ValueError(f"{path} does not begin with a run's header: it is damaged or not a FedEcho record")
    return cast("Header", header)


def digest_and_evaluations(lines: Iterable[JsonObject]) -> tuple[str, list[JsonObject]]:
    """The sha256 of all arrival lines, and the evaluations.

    The digest is equal for runs with the same schedule and the same training results.
    """
    digest, evaluations = sha256(), list[JsonObject]()
    for line in lines:
        if line["event"] == "arrival":
            digest.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        elif line["event"] == EVALUATION:
            evaluations.append(line)
    return digest.hexdigest(), evaluations


def _numbers(metrics: Mapping[str, Any]) -> JsonObject:
    """The finite numbers among the metrics of a client or a method."""
    return {key: rounded(value) for key, value in metrics.items() if isinstance(value, int | float) and isfinite(value)}


def rounded(value: float, digits: int = 9) -> float:
    """Round to significant digits. Nine are enough to distinguish any two float32 values."""
    return float(f"{value:.{digits}g}")

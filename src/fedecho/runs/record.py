"""``run.jsonl``: what happened, one JSON object a line.

A header, then a line per dispatch, per message of a client, per version and per evaluation. Real time stands in evaluations alone,
so the other lines are the same bytes however the run was computed. A sampled record (``every``) has the dispatch and the answer of
every so many jobs, by the number of the dispatch; versions and evaluations are all there.
"""

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, cast

from fedecho.core.loop import Moment
from fedecho.core.server import Receipt
from fedecho.runs.record_schema import Header, Misfit, check_line, loaded
from fedecho.simulation.runtimes import ClientRuntimes
from fedecho.storage.checkpoint import write_atomically
from fedecho.storage.files import DiskFullError, disk_full_at, open_own
from fedecho.storage.user_files import MIB

RECORD = "run.jsonl"
MOST_LINE_BYTES = 256 * MIB
OF_CLASS = "accuracy_class_"
"""How the names of a task's scores for single classes begin."""

REFUSED_ONLY = ("reason", "code")
"""Fields of an answer that is not accepted. A client's metric of such a name must not stand in their place."""

EVALUATION, INITIAL = "evaluation", "initial evaluation"
"""Events of scores. The initial one is of version 0, which nobody has trained; only deployments record it."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a record that a checkpoint may come back to, and the sha256 of all before it (None: an old checkpoint's)."""

    position: int
    sha256: str | None
    others: int = 0
    """Messages so far that were about no job."""


class Record:
    """Appends lines, and knows the digest of all it holds."""

    def __init__(self, file: BinaryIO, runtimes: ClientRuntimes, path: Path = Path(RECORD), every: int = 1) -> None:
        self._file = file
        self._runtimes = runtimes
        self._path = path
        self._every = every
        self._others = 0
        self._digest = sha256()

    @classmethod
    def in_memory(cls, runtimes: ClientRuntimes, every: int = 1) -> "Record":
        return cls(io.BytesIO(), runtimes, every=every)

    @classmethod
    def new(cls, folder: Path, runtimes: ClientRuntimes, header: Line, every: int = 1) -> "Record":
        line = json.dumps({"event": "header", **header}, separators=(",", ":"))
        write_atomically(folder / RECORD, line.encode() + b"\n")  # never there without its header
        return cls.continued(folder, runtimes, None, every)

    @classmethod
    def continued(cls, folder: Path, runtimes: ClientRuntimes, mark: Mark | None, every: int = 1) -> "Record":
        """The record as it stood at ``mark`` (None: after its header); what came later will be lived through again."""
        path = folder / RECORD
        file = open(path, "rb+", opener=open_own)  # noqa: SIM115 (a Path takes no opener; the record closes it)
        record = cls(file, runtimes, path, every)
        position = len(file.readline()) if mark is None else mark.position
        whole = record._take(position)
        if mark is not None and (not whole or mark.sha256 not in (None, record._digest.hexdigest())):
            file.close()
            raise ValueError(f"{path} is shorter or another than when its checkpoint was made; start the run in a new folder")
        record._others = 0 if mark is None else mark.others
        file.truncate(position)
        file.seek(position)
        return record

    def _take(self, position: int) -> bool:
        """The digest of what lies before ``position``, read a little at a time; is there so much?"""
        self._file.seek(0)
        left = position
        while left and (piece := self._file.read(min(left, 2**20))):
            self._digest.update(piece)
            left -= len(piece)
        return left == 0

    def write(self, line: Line) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._digest.update(data)
        with disk_full_at(self._path):
            self._file.write(data)

    def moment(self, moment: Moment) -> None:
        receipt = moment.receipt
        for sent in moment.sent:
            if sent.number % self._every == 0:
                own = {"event": "dispatch", "time": rounded(sent.time), "client": sent.client}
                self.write(own | {"dispatch": sent.number, "base": sent.base_version})
        if self._is_told(receipt):
            self.write(self._arrival(moment.time, receipt))
        if moment.step is not None:
            step = moment.step
            own = {"event": "version", "version": step.model.version, "time": rounded(moment.time)}
            self.write(_numbers(step.metrics) | own)

    def _is_told(self, receipt: Receipt) -> bool:
        """The answer to a dispatch that is told, and every so many of the messages about no job."""
        if receipt.dispatch >= 0:
            return receipt.dispatch % self._every == 0
        self._others += 1
        return (self._others - 1) % self._every == 0

    def evaluation(self, version: int, time: float, scores: Mapping[str, float], costs: Line, event: str = EVALUATION) -> Line:
        """The scores, those of single classes as one list, and what is measured of the machine; that is new every time."""
        own: Line = {"event": event, "version": version, "time": time}
        line = own | {name: score for name, score in scores.items() if name not in own and not name.startswith(OF_CLASS)}
        of_class = [rounded(score, 4) for name, score in scores.items() if name.startswith(OF_CLASS)]
        if of_class:
            line["per_class"] = of_class
        line |= costs
        self.write(line)
        self.flush()
        return line

    def _arrival(self, time: float, receipt: Receipt) -> Line:
        line: Line = {"event": "arrival", "time": rounded(time), "client": receipt.client, "status": receipt.status}
        if receipt.reason:
            line["reason"] = receipt.reason
        if receipt.code:
            line["code"] = receipt.code
        if receipt.dispatch >= 0:
            line |= {"dispatch": receipt.dispatch, "base": receipt.base_version, "staleness": receipt.staleness}
            line["class"] = self._runtimes.class_of(receipt.client)
        if receipt.status == "accepted":
            metrics = {name: value for name, value in receipt.metrics.items() if name not in REFUSED_ONLY}
            line = _numbers(metrics) | line | {"norm": rounded(receipt.norm)}
        return line

    def sync(self) -> Mark:
        """Everything so far is on the disk; the place behind it."""
        with disk_full_at(self._path):
            self._file.flush()
            if not isinstance(self._file, io.BytesIO):
                os.fsync(self._file.fileno())
        return Mark(self._file.tell(), self._digest.hexdigest(), self._others)

    def flush(self) -> None:
        with disk_full_at(self._path):
            self._file.flush()

    def close(self) -> None:
        """What finds no space here came after the last ``sync``, and will be lived through again."""
        with suppress(DiskFullError), disk_full_at(self._path):
            self._file.close()

    def lines(self) -> Iterator[Line]:
        """All lines so far, one after the other. Nothing may be written before the last of them."""
        self.flush()
        end = self._file.tell()
        self._file.seek(0)
        try:
            while self._file.tell() < end:
                yield json.loads(self._file.readline())
        finally:
            self._file.seek(end)


def read_record(folder: Path, position: int = 0) -> Iterator[Line]:
    """The complete lines of a run's record, from ``position`` on; a torn last line, as a crash leaves it, is passed over."""
    path = folder / RECORD
    place = 0
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line.endswith(b"\n") and place >= position:
                yield _parsed(line, path, number)
            place += len(line)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """A file that is no record may be one line, as large as the disk."""
    for number in count(1):
        line = file.readline(MOST_LINE_BYTES + 1)
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(
                f"{path}, line {number} has more than {MOST_LINE_BYTES} bytes; it is damaged or of another program"
            )
        if not line:
            return
        yield line


def _parsed(line: bytes, path: Path, number: int) -> Line:
    try:
        parsed: Line = loaded(line)
    except ValueError:
        parsed = {}
    if type(parsed) is not dict or "event" not in parsed:
        raise ValueError(f"{path}, line {number} is no line of a run's record; it is damaged or of another program")
    try:
        check_line(parsed)
    except Misfit as error:
        raise ValueError(f"{path}, line {number}: {error}; the record is damaged or of another program") from None
    return parsed


def read_header(folder: Path) -> Header:
    path = folder / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} holds no run (there is no {RECORD} in it)")
    with path.open("rb") as file:
        line = next(_lines(file, path), b"")
    header = _parsed(line, path, 1) if line.endswith(b"\n") else {}
    if header.get("event") != "header":
        raise ValueError(f"{path} does not begin with a run's header; it is damaged or of another program")
    return cast("Header", header)


def arrivals_digest(lines: Iterator[Mapping[str, Any]]) -> str:
    """The sha256 of all that clients did: equal for runs that had the same schedule and learnt the same."""
    digest = sha256()
    for line in lines:
        if line["event"] == "arrival":
            digest.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def noting(lines: Iterator[Line], evaluations: list[Line]) -> Iterator[Line]:
    """The lines, with the evaluations among them kept on the way: a long record is read once, and never held."""
    for line in lines:
        if line["event"] == "evaluation":
            evaluations.append(line)
        yield line


def _numbers(metrics: Mapping[str, Any]) -> Line:
    """What a client or a method says of itself, as far as it is numbers; it never overwrites what we say."""
    return {key: rounded(value) for key, value in metrics.items() if isinstance(value, int | float) and isfinite(value)}


def rounded(value: float, digits: int = 9) -> float:
    """Nine digits: enough to tell any two float32 apart, short enough to read."""
    return float(f"{value:.{digits}g}")

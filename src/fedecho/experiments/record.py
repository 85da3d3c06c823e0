"""``run.jsonl``: what happened, one JSON object a line.

A header, then a line per dispatch, per message of a client, per version and per evaluation. Real time stands in evaluations alone,
so the other lines are the same bytes however the run was computed.
"""

import io
import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from fedecho.core.checkpoint import write_atomically
from fedecho.core.drive import Moment
from fedecho.core.server import Receipt
from fedecho.simulation.runtimes import ClientRuntimes

RECORD = "run.jsonl"
OF_CLASS = "accuracy_class_"
"""How the names of a task's scores for single classes begin."""

Line = dict[str, Any]


class Record:
    """Appends lines. ``position`` is where a checkpoint may come back to."""

    def __init__(self, file: BinaryIO, runtimes: ClientRuntimes) -> None:
        self._file = file
        self._runtimes = runtimes

    @classmethod
    def in_memory(cls, runtimes: ClientRuntimes) -> "Record":
        return cls(io.BytesIO(), runtimes)

    @classmethod
    def new(cls, folder: Path, runtimes: ClientRuntimes, header: Line) -> "Record":
        line = json.dumps({"event": "header", **header}, separators=(",", ":"))
        write_atomically(folder / RECORD, line.encode() + b"\n")  # never there without its header
        return cls.continued(folder, runtimes, None)

    @classmethod
    def continued(cls, folder: Path, runtimes: ClientRuntimes, position: int | None) -> "Record":
        """The record as it stood at ``position`` (None: after its header); what came later will be lived through again."""
        file = (folder / RECORD).open("rb+")
        if position is None:
            position = len(file.readline())
        if position > file.seek(0, os.SEEK_END):
            file.close()
            raise ValueError(f"{folder / RECORD} is shorter than when its checkpoint was made; start the run in a new folder")
        file.truncate(position)
        file.seek(position)
        return cls(file, runtimes)

    def write(self, line: Line) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def moment(self, moment: Moment) -> None:
        receipt = moment.receipt
        for sent in moment.sent:
            own = {"event": "dispatch", "time": _rounded(sent.time), "client": sent.client}
            self.write(own | {"dispatch": sent.number, "base": sent.base_version})
        self.write(self._arrival(moment.time, receipt))
        if moment.step is not None:
            step = moment.step
            own = {"event": "version", "version": step.model.version, "time": _rounded(moment.time)}
            self.write(_numbers(step.metrics) | own)

    def evaluation(self, version: int, time: float, scores: Mapping[str, float], costs: Line) -> Line:
        """The scores, those of single classes as one list, and what is measured of the machine; that is new every time."""
        plain = {name: score for name, score in scores.items() if not name.startswith(OF_CLASS)}
        line: Line = {"event": "evaluation", "version": version, "time": time, **plain}
        of_class = [_rounded(score, 4) for name, score in scores.items() if name.startswith(OF_CLASS)]
        if of_class:
            line["per_class"] = of_class
        line |= costs
        self.write(line)
        self.flush()
        return line

    def _arrival(self, time: float, receipt: Receipt) -> Line:
        line: Line = {"event": "arrival", "time": _rounded(time), "client": receipt.client, "status": receipt.status}
        if receipt.reason:
            line["reason"] = receipt.reason
        if receipt.dispatch >= 0:
            line |= {"dispatch": receipt.dispatch, "base": receipt.base_version, "staleness": receipt.staleness}
            line["class"] = self._runtimes.class_of(receipt.client)
        if receipt.status == "accepted":
            line = _numbers(receipt.metrics) | line | {"norm": _rounded(receipt.norm)}
        return line

    def sync(self) -> int:
        """Everything so far is on the disk; the position behind it."""
        self._file.flush()
        if not isinstance(self._file, io.BytesIO):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def lines(self) -> Iterator[Line]:
        """All complete lines so far."""
        self._file.flush()
        here = self._file.tell()
        self._file.seek(0)
        lines = self._file.read(here).splitlines()
        return (json.loads(line) for line in lines)


def read_record(folder: Path) -> Iterator[Line]:
    """The complete lines of a run's record; a torn last line, as a crash leaves it, is passed over."""
    with (folder / RECORD).open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def read_header(folder: Path) -> Line:
    path = folder / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} holds no run (there is no {RECORD} in it)")
    try:
        header: Line = next(read_record(folder))
        if header["event"] != "header":
            raise KeyError("event")
    except (StopIteration, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} does not begin with a run's header; it is damaged or of another program") from None
    return header


def arrivals_digest(lines: Iterator[Mapping[str, Any]]) -> str:
    """The sha256 of all that clients did: equal for runs that had the same schedule and learnt the same."""
    digest = sha256()
    for line in lines:
        if line["event"] == "arrival":
            digest.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def _numbers(metrics: Mapping[str, Any]) -> Line:
    """What a client or a method says of itself, as far as it is numbers; it never overwrites what we say."""
    return {key: _rounded(value) for key, value in metrics.items() if isinstance(value, int | float) and isfinite(value)}


def _rounded(value: float, digits: int = 9) -> float:
    """Nine digits: enough to tell any two float32 apart, short enough to read."""
    return float(f"{value:.{digits}g}")

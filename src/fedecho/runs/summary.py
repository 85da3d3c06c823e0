"""The summary of a finished run, ``summary.json``."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from fedecho.runs.json_types import SchemaError, is_number, loaded
from fedecho.runs.record_schema import Spent, check_fields
from fedecho.storage.files import write_atomically
from fedecho.storage.user_files import MIB, FileError, read_bytes

SUMMARY = "summary.json"
MOST_BYTES = 64 * MIB
LAST = 10
STRAGGLER_ACCURACY = "straggler_accuracy"
"""The score of the slow clients' classes (runs/evaluation.py)."""
NOT_SCORES = ("event", "version", "time", "real_s", "clients_s", "server_s", "versions_alive", "peak_bytes", "per_class")
"""Fields of an evaluation's line that are not scores of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The results of a run. The main one is ``last10_accuracy``: single evaluations fluctuate because of stragglers."""

    name: str
    algorithm: str
    seed: int
    num_versions: int
    final_accuracy: float
    last10_accuracy: float
    best_accuracy: float
    virtual_s: float
    real_s: float
    accepted: int
    rejected: int
    lost: int
    reasons: dict[str, int]
    mean_staleness: float
    max_staleness: int
    peak_versions_alive: int
    bank_bytes: int
    model_sha256: str
    arrivals_sha256: str
    scores: dict[str, float] = field(default_factory=dict)
    """All scores of the last evaluation."""
    notes: dict[str, str] = field(default_factory=dict)
    """The task's notes for reports."""
    privacy: Spent | None = None
    """The clients' epsilons, the largest epsilon, and delta. None for a run without privacy."""
    record_every: int = 1
    """The record, and thus ``arrivals_sha256``, has only every n-th job. All other figures count all jobs."""

    def write(self, folder: Path) -> None:
        write_atomically(folder / SUMMARY, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Summary":
        path = folder / SUMMARY
        try:
            return cls(**check_fields(cls, loaded(read_bytes(path, MOST_BYTES))))
        except FileError:
            raise
        except (ValueError, SchemaError) as error:
            raise ValueError(
                f"{path} is damaged ({error}); remove it and run `fedecho resume {folder}` to recreate it"
            ) from None


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def accuracies(evaluations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The final, last-ten-mean and best accuracy. NaN if there is none."""
    values = [line["accuracy"] for line in evaluations if "accuracy" in line] or [nan]
    last = values[-LAST:]
    return {"final_accuracy": values[-1], "last10_accuracy": sum(last) / len(last), "best_accuracy": max(values)}


def last_scores(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The task's scores in the last evaluation. Empty if nothing was evaluated."""
    last = evaluations[-1] if evaluations else {}
    return {key: value for key, value in last.items() if key not in NOT_SCORES and is_number(value)}


def staleness(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean and maximum staleness of the accepted updates among the lines."""
    values = [line["staleness"] for line in lines if line.get("status") == "accepted"]
    return {"mean_staleness": sum(values) / len(values), "max_staleness": max(values)}

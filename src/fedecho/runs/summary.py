"""``summary.json``: what a run came to."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from fedecho.runs.record_schema import Misfit, Spent, check_fields, is_number, loaded
from fedecho.storage.checkpoint import write_atomically
from fedecho.storage.user_files import MIB, FileError, read_bytes

SUMMARY = "summary.json"
MOST_BYTES = 64 * MIB
LAST = 10
NOT_SCORES = ("event", "version", "time", "real_s", "clients_s", "server_s", "versions_alive", "peak_bytes", "per_class")
"""What an evaluation's line says beside the task's own scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The headline is ``last10_accuracy``, the mean of the last ten evaluations: single ones jump under stragglers."""

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
    """All that the last evaluation gave."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the task wants said beside them."""
    privacy: Spent | None = None
    """The clients' epsilons, the largest and delta; None for a run without privacy."""
    record_every: int = 1
    """The record, and so ``arrivals_sha256``, has every so many jobs; all other numbers are of all of them."""

    def write(self, folder: Path) -> None:
        write_atomically(folder / SUMMARY, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Summary":
        path = folder / SUMMARY
        try:
            return cls(**check_fields(cls, loaded(read_bytes(path, MOST_BYTES))))
        except FileError:
            raise
        except (ValueError, Misfit) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it, then `fedecho resume {folder}` makes it again") from None


def accuracies(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Final, mean of the last ten and best, of the evaluations among the lines; not a number where none has an accuracy."""
    found = [line["accuracy"] for line in lines if line["event"] == "evaluation" and "accuracy" in line] or [nan]
    last = found[-LAST:]
    return {"final_accuracy": found[-1], "last10_accuracy": sum(last) / len(last), "best_accuracy": max(found)}


def last_scores(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last evaluation's scores, as the task named them; none where nothing was evaluated."""
    last: dict[str, Any] = ([{}] + [dict(line) for line in lines if line["event"] == "evaluation"])[-1]
    return {key: value for key, value in last.items() if key not in NOT_SCORES and is_number(value)}


def staleness(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found = [line["staleness"] for line in lines if line.get("status") == "accepted"]
    return {"mean_staleness": sum(found) / len(found), "max_staleness": max(found)}

"""Results of table cells: one file per cell with everything needed to rerun it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedecho.paper.tables import Cell
from fedecho.paper.text_tables import first_of
from fedecho.runs.json_types import SchemaError, is_number, loaded
from fedecho.runs.record import JsonObject
from fedecho.runs.record_schema import check_cell
from fedecho.runs.resolve import differences, with_defaults
from fedecho.runs.suggestions import ConfigError
from fedecho.runs.summary import LAST
from fedecho.storage.user_files import MIB, read_bytes


@dataclass(frozen=True)
class CellResult:
    """The result of a cell: its summary, evaluations, configuration and environment."""

    cell: str
    summary: dict[str, Any]
    evaluations: list[JsonObject]
    config: JsonObject
    execution: JsonObject
    software: JsonObject
    unlabeled: str
    commit: str
    notes: dict[str, str] = field(default_factory=dict)
    diverged: str = ""
    """Why the run was aborted, or empty. A diverged run has no accuracy; its summary has the last version."""

    @property
    def accuracy(self) -> float:
        return float(self.summary.get("accuracy", self.summary["last10_accuracy"]))

    def until(self, end_s: float | None) -> "CellResult":
        """The result at a virtual time, for the comparison of methods whose runs end at different times."""
        if end_s is None or self.diverged:
            return self
        if self.summary["virtual_s"] < end_s:
            raise ValueError(
                f"{self.cell} ended after {self.summary['virtual_s']:.0f} virtual s, before {end_s:.0f}: run it longer"
            )
        return replace(self, summary=self.summary | scores_until(self.evaluations, end_s))

    def score(self, name: str) -> "Score | None":
        """A score's mean over the last ten evaluations, like ``accuracy``, or of the last one if the others were not kept.

        Scores in the summary, such as ``best_accuracy``, are returned as they are.
        """
        if name in self.summary:
            return Score(float(self.summary[name]))
        values = [line[name] for line in self.evaluations[-LAST:] if is_number(line.get(name))]
        if values and len(values) == len(self.evaluations[-LAST:]):
            return Score(fmean(values))
        last = self.summary.get("scores", {}).get(name)
        return None if last is None else Score(float(last), only_last=True)

    @property
    def stand_in(self) -> str:
        """What replaced the paper's model or data. Empty if nothing did."""
        return self.notes.get("stand_in", "")


@dataclass(frozen=True)
class Score:
    value: float
    only_last: bool = False


GOAL = 0.9
FINAL_SHARE = 0.1
"""The final accuracy is the mean over the last tenth of the time."""


def scores_until(evaluations: Sequence[dict[str, Any]], end_s: float) -> dict[str, Any]:
    """Return final accuracy, the same on the slow clients' classes, area under the curve and minutes to 90 % accuracy.

    ``minutes_to_90`` is the whole time, and ``reached_90`` false, for a run that never gets there.
    """
    reached = next((line["time"] for line in evaluations if line["accuracy"] >= GOAL and line["time"] <= end_s), None)
    began = (1 - FINAL_SHARE) * end_s
    scores = {
        "accuracy": time_mean(evaluations, "accuracy", began, end_s),
        "area": time_mean(evaluations, "accuracy", 0.0, end_s),
        "minutes_to_90": (end_s if reached is None else reached) / 60,
        "reached_90": reached is not None,
    }
    if all("straggler_accuracy" in line for line in evaluations):
        scores["straggler_accuracy"] = time_mean(evaluations, "straggler_accuracy", began, end_s)
    return scores


def time_mean(evaluations: Sequence[dict[str, Any]], name: str, begin_s: float, end_s: float) -> float:
    """Return the mean of a score over a span of virtual time. It is 0 before the first evaluation."""
    times = [line["time"] for line in evaluations]
    total = 0.0
    for line, begins, ends in zip(evaluations, times, [*times[1:], end_s], strict=True):
        total += line[name] * max(0.0, min(ends, end_s) - max(begins, begin_s))
    return total / (end_s - begin_s)


def path_of(results: Path, cell: Cell) -> Path:
    first = first_of(cell)
    return results / first.table / f"{first.slug}.json"


def read_result(results: Path, cell: Cell) -> CellResult | None:
    """Read the result of a cell, or None if it has not run. A result with other settings is an error."""
    path = path_of(results, cell)
    if not path.is_file():
        return None
    expected = first_of(cell).config()
    try:
        result = CellResult(**check_cell(loaded(read_bytes(path, 64 * MIB))))
        others = _other_settings(expected, with_defaults(result.config), cell.row.untrained)
        _check_complete(result)
    except (ValueError, TypeError, KeyError, AttributeError, SchemaError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to run the cell again") from None
    if others:
        raise ConfigError(
            f"{path} was made with other settings ({'; '.join(others[:3])}): use the same --set, or another --results folder"
        )
    return result


def _check_complete(result: CellResult) -> None:
    """Check that a result has everything that tables show. A diverged run may have no evaluations."""
    if not result.diverged and not (isinstance(result.accuracy, float) and result.evaluations):
        raise TypeError("it has no evaluations")
    if not (isinstance(result.execution, dict) and isinstance(result.notes, dict) and "torch" in result.software):
        raise TypeError("it does not say where it ran")


def _other_settings(ours: JsonObject, theirs: JsonObject, untrained: bool) -> list[str]:
    """The settings that differ, except for the location of the data."""
    if untrained:  # training settings do not matter
        ours, theirs = {"task": ours["task"]}, {"task": theirs["task"]}
    for tree in (ours, theirs):
        tree["task"].pop("data_dir", None)
    return differences(ours, theirs)

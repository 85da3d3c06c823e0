"""Results of table cells: one file per cell with everything needed to rerun it, and running the missing cells."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fedecho.paper.tables import Cell
from fedecho.paper.text_tables import first_of
from fedecho.paper.virtual_time import scores_until
from fedecho.runs.build import assembled, distiller_of, one_thread
from fedecho.runs.config import ConfigError, completed, differences, to_config
from fedecho.runs.evaluation import Evaluator
from fedecho.runs.execution import Execution, check_same_arithmetic
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import FolderInUse, locked_file
from fedecho.runs.identity import check_same, config_of, is_finished, notes_of, software
from fedecho.runs.job_processes import Report, Say, See, run_jobs
from fedecho.runs.record import RECORD, JsonObject, read_header, read_record
from fedecho.runs.record_schema import SchemaError, check_cell, is_number, loaded
from fedecho.runs.run import CHECKPOINT_S, Interrupted, simulate
from fedecho.runs.run_stats import DivergedError, ProgressWatch, RunState, Watch
from fedecho.runs.signals import stop_signals
from fedecho.runs.summary import LAST, Summary
from fedecho.storage.files import make_private, write_atomically
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


def path_of(results: Path, cell: Cell) -> Path:
    first = first_of(cell)
    return results / first.table / f"{first.slug}.json"


def run_folder(runs: Path, cell: Cell) -> Path:
    first = first_of(cell)
    return runs / first.table / first.slug


def read_result(results: Path, cell: Cell) -> CellResult | None:
    """Read the result of a cell, or None if it has not run. A result with other settings is an error."""
    path = path_of(results, cell)
    if not path.is_file():
        return None
    expected = to_config(first_of(cell).experiment())
    try:
        result = CellResult(**check_cell(loaded(read_bytes(path, 64 * MIB))))
        others = _other_settings(expected, completed(result.config), cell.row.untrained)
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


def run_cell(
    cell: Cell,
    *,
    results: Path,
    runs: Path,
    options: dict[str, Any],
    checkpoint_s: float = CHECKPOINT_S,
    watch: Watch | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> CellResult:
    """Run or resume a cell and save its result."""
    experiment, folder = cell.experiment(), run_folder(runs, cell)
    if cell.row.untrained:
        return _saved(results, cell, _untrained(cell, experiment, Execution(**options), watch, say))
    resume = (folder / RECORD).exists()
    if resume:
        check_same_arithmetic(folder, read_header(folder)["execution"], Execution(**options))
    try:
        if is_finished(folder):  # an earlier process was stopped before it saved the result
            check_same(folder, experiment)
        else:
            simulate(experiment, out=folder, resume=resume, checkpoint_s=checkpoint_s, watch=watch, say=say, **options)
        summary, diverged = asdict(Summary.read(folder)), ""
    except DivergedError as error:
        say(str(error))
        summary, diverged = {"num_versions": _last_version(folder)}, str(error)
    header = read_header(folder)
    result = CellResult(
        cell=first_of(cell).slug,
        summary=summary,
        evaluations=_evaluations(folder),
        config=header["config"] or {},
        execution=header["execution"],
        software=header.get("software", {}),
        unlabeled=_unlabeled(experiment),
        commit=commit(),
        notes=notes_of(experiment.task),
        diverged=diverged,
    )
    return _saved(results, cell, result)


def _last_version(folder: Path) -> int:
    return max((line["version"] for line in read_record(folder) if line["event"] == "version"), default=0)


def _untrained(
    cell: Cell, experiment: Experiment, execution: Execution, watch: Watch | None, say: Callable[[str], None]
) -> CellResult:
    """Evaluate the untrained model once."""
    began = time.perf_counter()
    with one_thread(), assembled(experiment, execution) as simulation, stop_signals(say) as stop:
        scores = Evaluator(simulation, watch, stop).scores()
        if scores is None:
            raise Interrupted("stopped before the evaluation was complete; run the same command again to repeat it")
        execution_used = simulation.execution.described()
    accuracy, real_s = scores["accuracy"], round(time.perf_counter() - began, 3)
    summary = {"num_versions": 0, "last10_accuracy": accuracy, "final_accuracy": accuracy, "scores": scores, "real_s": real_s}
    return CellResult(
        cell=first_of(cell).slug,
        summary=summary,
        evaluations=[{"version": 0, "time": 0.0, **scores, "real_s": real_s}],
        config=config_of(experiment) or {},
        execution=execution_used,
        software=software(),
        unlabeled="",
        commit=commit(),
        notes=notes_of(experiment.task),
    )


def _saved(results: Path, cell: Cell, result: CellResult) -> CellResult:
    target = path_of(results, cell)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, _text(asdict(result)).encode())
    return result


def _text(tree: JsonObject) -> str:
    """JSON with a line per key, and per evaluation."""
    evaluations = ",\n".join(f"  {json.dumps(line)}" for line in tree["evaluations"])
    values = {key: json.dumps(value) for key, value in tree.items()} | {"evaluations": f"[\n{evaluations}\n ]"}
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {value}" for key, value in values.items()) + "\n}\n"


def _evaluations(folder: Path) -> list[JsonObject]:
    lines = (line for line in read_record(folder) if line["event"] == "evaluation")
    return [{key: value for key, value in line.items() if key != "event"} for line in lines]


def _unlabeled(experiment: Any) -> str:
    uses = distiller_of(experiment) is not None and hasattr(experiment.task, "provenance")
    return str(experiment.task.provenance) if uses else ""


def commit() -> str:
    """The git commit of this code, or FEDECHO_COMMIT if set (for installs without a checkout)."""
    if "FEDECHO_COMMIT" in os.environ:
        return os.environ["FEDECHO_COMMIT"]
    here = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)  # noqa: S607
    return git.stdout.strip() if git.returncode == 0 else ""


@dataclass(frozen=True, kw_only=True)
class CellRunner:
    """How missing cells are run: the folders for results and runs, and keyword arguments for ``simulate``."""

    results: Path
    runs: Path
    options: dict[str, Any]
    checkpoint_s: float = CHECKPOINT_S

    def run(self, cell: Cell, report: Report, say: Say) -> None:
        """Run a cell, unless it has a result or another process is running it."""
        folder = run_folder(self.runs, cell)
        watch = ProgressWatch(folder, RunState(cell.experiment().num_versions), report)
        make_private(folder.parent)
        try:
            # From the look for a result until it is saved: the run's own lock is free before and after the run.
            with locked_file(folder.with_name(f"{folder.name}.lock"), folder, say):
                if read_result(self.results, cell) is None:
                    run_cell(cell, **vars(self), watch=watch, say=say)
        except FolderInUse as error:
            say(f"skipped: {error}")


def fill(filling: CellRunner, cells: Sequence[Cell], *, jobs: int, see: See, say: Say) -> None:
    """Run the cells: one after another in this process, or ``jobs`` at a time in processes of their own."""
    if jobs == 1:
        for cell in cells:
            filling.run(cell, partial(see, cell.slug), partial(_say_with_label, say, cell.slug))
    elif cells:
        run_jobs({cell.slug: partial(filling.run, cell) for cell in cells}, jobs=jobs, see=see, say=say)


def _say_with_label(say: Say, label: str, text: str) -> None:
    say(f"{label}: {text}")

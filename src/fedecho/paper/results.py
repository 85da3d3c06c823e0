"""Results: one small file per cell with all that is needed to run it again, and the filling of missing cells."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fedecho.paper.tables import Cell
from fedecho.paper.text_tables import first_of
from fedecho.runs.build import assembled, distiller_of, one_thread
from fedecho.runs.config import ConfigError, completed, differences, to_config
from fedecho.runs.evaluation import Judge
from fedecho.runs.execution import Execution, check_same_arithmetic
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import FolderInUse
from fedecho.runs.identity import check_same, config_of, header_of, is_finished, notes_of
from fedecho.runs.job_processes import Say, See, Tell, beside
from fedecho.runs.record import RECORD, Line, read_header, read_record
from fedecho.runs.run import CHECKPOINT_S, Interrupted, simulate
from fedecho.runs.run_stats import DivergedError, Following, RunState, Watch
from fedecho.runs.signals import stop_signals
from fedecho.runs.summary import LAST, Summary
from fedecho.storage.checkpoint import write_atomically
from fedecho.storage.user_files import MIB, read_bytes


@dataclass(frozen=True)
class CellResult:
    """A finished cell: its summary, its evaluations, its configuration and where it ran."""

    cell: str
    summary: dict[str, Any]
    evaluations: list[Line]
    config: Line
    execution: Line
    software: Line
    unlabeled: str
    commit: str
    notes: dict[str, str] = field(default_factory=dict)
    diverged: str = ""
    """Why the run was given up, with the version it came to in its summary; it has no accuracy then."""

    @property
    def accuracy(self) -> float:
        return float(self.summary["last10_accuracy"])

    def score(self, name: str) -> "Score | None":
        """The mean over the evaluations that ``accuracy`` is the mean of; of the last alone where the others were not kept.

        ``best_accuracy`` and ``final_accuracy`` are a run's own.
        """
        if name in self.summary:
            return Score(float(self.summary[name]))
        values = [line[name] for line in self.evaluations[-LAST:] if name in line]
        if values and len(values) == len(self.evaluations[-LAST:]):
            return Score(fmean(values))
        last = self.summary.get("scores", {}).get(name)
        return None if last is None else Score(float(last), only_last=True)

    @property
    def stand_in(self) -> str:
        """What took the place of the paper's own model or data; empty if nothing did."""
        return self.notes.get("stand_in", "")


@dataclass(frozen=True)
class Score:
    value: float
    only_last: bool = False


def path_of(results: Path, cell: Cell) -> Path:
    kept = first_of(cell)
    return results / kept.table / f"{kept.slug}.json"


def run_folder(runs: Path, cell: Cell) -> Path:
    kept = first_of(cell)
    return runs / kept.table / kept.slug


def read_result(results: Path, cell: Cell) -> CellResult | None:
    """What is kept of a cell; an error if that was made with other settings."""
    path = path_of(results, cell)
    if not path.is_file():
        return None
    wanted = to_config(first_of(cell).experiment())
    try:
        kept = CellResult(**json.loads(read_bytes(path, 64 * MIB)))
        others = _other_settings(wanted, completed(kept.config), cell.row.untrained)
        _check_whole(kept)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to run the cell again") from None
    if others:
        raise ConfigError(
            f"{path} was made with other settings ({'; '.join(others[:3])}): give the same --set, or another --results folder"
        )
    return kept


def _check_whole(kept: CellResult) -> None:
    """Has it all that a table is made of? A run that diverged may never have been judged."""
    if not kept.diverged and not (isinstance(kept.accuracy, float) and kept.evaluations):
        raise TypeError("it has no evaluations")
    if not (isinstance(kept.execution, dict) and isinstance(kept.notes, dict) and "torch" in kept.software):
        raise TypeError("it does not say where it ran")


def _other_settings(ours: Line, theirs: Line, untrained: bool) -> list[str]:
    """Wherever its data were. What a fedecho of before did not know yet has its default."""
    if untrained:  # it does not matter how it would be trained
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
    """Run a cell, or go on with it where it was stopped, and keep its result."""
    experiment, folder = cell.experiment(), run_folder(runs, cell)
    if cell.row.untrained:
        return _kept(results, cell, _untrained(cell, experiment, Execution(**options), watch, say))
    resume = (folder / RECORD).exists()
    if resume:
        check_same_arithmetic(folder, read_header(folder)["execution"], Execution(**options))
    try:
        if is_finished(folder):  # it was stopped between its end and this
            check_same(folder, experiment)
        else:
            simulate(experiment, out=folder, resume=resume, checkpoint_s=checkpoint_s, watch=watch, say=say, **options)
        summary, diverged = asdict(Summary.read(folder)), ""
    except DivergedError as error:
        say(str(error))
        summary, diverged = _so_far(folder), str(error)
    header = read_header(folder)
    kept = CellResult(
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
    return _kept(results, cell, kept)


def _so_far(folder: Path) -> dict[str, Any]:
    """How far a run came that was given up."""
    return {"num_versions": max((line["version"] for line in read_record(folder) if line["event"] == "version"), default=0)}


def _untrained(
    cell: Cell, experiment: Experiment, execution: Execution, watch: Watch | None, say: Callable[[str], None]
) -> CellResult:
    """The model as it was, evaluated once."""
    began = time.perf_counter()
    with one_thread(), assembled(experiment, execution) as simulation, stop_signals(say) as stop:
        scores = Judge(simulation, watch, stop).scores()
        if scores is None:
            raise Interrupted("stopped before the model was judged; the same command begins that again")
        header = header_of(simulation, config_of(experiment), simulation.execution.described())
    accuracy, real_s = scores["accuracy"], round(time.perf_counter() - began, 3)
    summary = {"num_versions": 0, "last10_accuracy": accuracy, "final_accuracy": accuracy, "scores": scores, "real_s": real_s}
    return CellResult(
        cell=first_of(cell).slug,
        summary=summary,
        evaluations=[{"version": 0, "time": 0.0, **scores, "real_s": real_s}],
        config=header["config"],
        execution=header["execution"],
        software=header["software"],
        unlabeled="",
        commit=commit(),
        notes=notes_of(experiment.task),
    )


def _kept(results: Path, cell: Cell, kept: CellResult) -> CellResult:
    target = path_of(results, cell)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, (json.dumps(asdict(kept), indent=1) + "\n").encode())
    return kept


def _evaluations(folder: Path) -> list[Line]:
    lines = (line for line in read_record(folder) if line["event"] == "evaluation")
    return [{key: value for key, value in line.items() if key != "event"} for line in lines]


def _unlabeled(experiment: Any) -> str:
    uses = distiller_of(experiment) is not None and hasattr(experiment.task, "provenance")
    return str(experiment.task.provenance) if uses else ""


def commit() -> str:
    """The commit of the checkout this runs from; FEDECHO_COMMIT says it where there is no checkout."""
    if "FEDECHO_COMMIT" in os.environ:
        return os.environ["FEDECHO_COMMIT"]
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)  # noqa: S607
    return found.stdout.strip() if found.returncode == 0 else ""


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Where results are kept and runs are, and how they are computed, in the words of ``simulate``."""

    results: Path
    runs: Path
    options: dict[str, Any]
    checkpoint_s: float = CHECKPOINT_S

    def run(self, cell: Cell, tell: Tell, say: Say) -> None:
        """What another process has taken is its own."""
        if read_result(self.results, cell) is not None:
            return
        watch = Following(run_folder(self.runs, cell), RunState(cell.experiment().num_versions), tell)
        try:
            run_cell(cell, **vars(self), watch=watch, say=say)
        except FolderInUse as error:
            say(f"passed over: {error}")


def fill(filling: Filling, cells: Sequence[Cell], *, jobs: int, see: See, say: Say) -> None:
    """Run the cells, one after another here, or several at a time in processes of their own."""
    if jobs == 1:
        for cell in cells:
            filling.run(cell, partial(see, cell.slug), partial(_by_name, say, cell.slug))
    elif cells:
        beside({cell.slug: partial(filling.run, cell) for cell in cells}, jobs=jobs, see=see, say=say)


def _by_name(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")

"""Runs the missing cells of a table and saves their results."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedecho.paper.results import CellResult, path_of, read_result
from fedecho.paper.tables import Cell
from fedecho.paper.text_tables import first_of
from fedecho.runs.build import assembled, distiller_of, one_thread
from fedecho.runs.evaluation import Evaluator
from fedecho.runs.execution import Execution, check_same_arithmetic
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import FolderInUse, locked_file
from fedecho.runs.identity import check_same, config_of, notes_of
from fedecho.runs.job_processes import Report, Say, See, run_jobs
from fedecho.runs.record import RECORD, JsonObject, read_header, read_record
from fedecho.runs.run import CHECKPOINT_S, Interrupted, simulate
from fedecho.runs.run_stats import DivergedError, ProgressWatch, RunState, Watch
from fedecho.runs.signals import Stop, stop_signals
from fedecho.runs.software import software
from fedecho.runs.summary import Summary, is_finished
from fedecho.storage.files import make_private, write_atomically


def run_folder(runs: Path, cell: Cell) -> Path:
    first = first_of(cell)
    return runs / first.table / first.slug


def run_cell(
    cell: Cell,
    *,
    results: Path,
    runs: Path,
    options: dict[str, Any],
    checkpoint_s: float = CHECKPOINT_S,
    watch: Watch | None = None,
    stop: Stop | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> CellResult:
    """Run or resume a cell and save its result."""
    experiment, folder = cell.experiment(), run_folder(runs, cell)
    if cell.row.untrained:
        return _saved(results, cell, _untrained(cell, experiment, Execution(**options), watch, stop, say))
    resume = (folder / RECORD).exists()
    if resume:
        check_same_arithmetic(folder, read_header(folder)["execution"], Execution(**options))
    try:
        if is_finished(folder):  # an earlier process was stopped before it saved the result
            check_same(folder, experiment)
        else:
            how: dict[str, Any] = {"checkpoint_s": checkpoint_s, "watch": watch, "stop": stop, "say": say, **options}
            simulate(experiment, out=folder, resume=resume, **how)
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
    cell: Cell,
    experiment: Experiment,
    execution: Execution,
    watch: Watch | None,
    stop: Stop | None,
    say: Callable[[str], None],
) -> CellResult:
    """Evaluate the untrained model once."""
    began = time.perf_counter()
    with one_thread(), assembled(experiment, execution) as simulation, stop_signals(say, stop) as asked:
        scores = Evaluator(simulation, watch, asked).scores()
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

    def run(self, cell: Cell, report: Report, say: Say, stop: Stop | None = None) -> None:
        """Run a cell, unless it has a result or another process is running it."""
        folder = run_folder(self.runs, cell)
        watch = ProgressWatch(folder, RunState(cell.experiment().num_versions), report)
        make_private(folder.parent)
        try:
            # From the look for a result until it is saved: the run's own lock is free before and after the run.
            with locked_file(folder.with_name(f"{folder.name}.lock"), folder, say):
                if read_result(self.results, cell) is None:
                    run_cell(cell, **vars(self), watch=watch, stop=stop, say=say)
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

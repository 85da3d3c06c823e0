"""The command line: ``fedecho list | run | compare | resume``."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedecho.algorithms import ALGORITHMS
from fedecho.core.checkpoint import CheckpointError
from fedecho.core.drive import Moment
from fedecho.experiments.build import Execution
from fedecho.experiments.compare import Planned, run_all
from fedecho.experiments.config import ConfigError, load
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.recipes import RECIPES
from fedecho.experiments.record import RECORD, read_header
from fedecho.experiments.run import CHECKPOINT_S, Interrupted, is_finished, simulate
from fedecho.experiments.run import resume as resume_run
from fedecho.experiments.state import RunState
from fedecho.report.progress import LiveProgress
from fedecho.report.tables import comparison
from fedecho.simulation.executors.pool import WorkerError
from fedecho.simulation.runtimes import PROFILES
from fedecho.tasks import TASKS

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous federated learning with uncertainty-aware distillation. Start with: fedecho run digits",
)
out = Console()
err = Console(stderr=True)

Source = Annotated[str, typer.Argument(metavar="RECIPE|FILE.toml", help="A recipe (see `fedecho list`) or a TOML file.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any value, e.g. local.client_lr=0.1")
]
ExecutorOption = Annotated[str, typer.Option("--executor", help="Where clients train: serial, pool or cuda.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="Processes of the pool (2), or clients at once on a GPU (8).")
]
PrecisionOption = Annotated[str, typer.Option("--precision", help="On a GPU: bf16 or fp32.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="On a GPU: the same bytes every time, slower.")]
CheckpointEvery = Annotated[float, typer.Option("--checkpoint-every", metavar="SECONDS", help="Real time between checkpoints.")]
Versions = Annotated[int | None, typer.Option("--versions", help="How many global versions to make.")]


@app.command("list")
def list_all() -> None:
    """Show the recipes, methods, tasks and runtime profiles."""
    out.print("[bold]recipes[/] (fedecho run NAME)")
    for name, recipe in RECIPES.items():
        out.print(f"  {name:10} {recipe.summary}", soft_wrap=True)
    out.print("[bold]algorithms[/] (--algorithm NAME)")
    for name, cls in ALGORITHMS.items():
        out.print(f"  {name:10} {_first_line(cls)}", soft_wrap=True)
    out.print("[bold]tasks[/] (task.name)")
    for name, cls in TASKS.items():
        out.print(f"  {name:10} {_first_line(cls)}", soft_wrap=True)
    out.print(f"[bold]runtime profiles[/] (--set runtimes.profile=NAME)\n  {', '.join(PROFILES)}")


@app.command()
def run(
    source: Source,
    algorithm: Annotated[str | None, typer.Option(help="Another method than the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of everything random.")] = None,
    versions: Versions = None,
    settings: Settings = None,
    executor: ExecutorOption = "serial",
    workers: WorkersOption = None,
    precision: PrecisionOption = "bf16",
    deterministic: Deterministic = False,
    checkpoint_every: CheckpointEvery = CHECKPOINT_S,
    folder: Annotated[Path | None, typer.Option("--out", help="The run's folder; must not hold a run yet.")] = None,
) -> None:
    """Run one experiment and record it in a folder."""
    with _friendly():
        experiment = load(source, algorithm=algorithm, seed=seed, versions=versions, settings=settings or ())
        options = _options(executor, workers, precision, deterministic, checkpoint_every)
        target = folder or _free_folder(experiment, algorithm)
        _usable(target)
        _finish(target, experiment, options)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that was stopped.")],
    executor: ExecutorOption = "serial",
    workers: WorkersOption = None,
    precision: PrecisionOption = "bf16",
    deterministic: Deterministic = False,
    checkpoint_every: CheckpointEvery = CHECKPOINT_S,
) -> None:
    """Go on with a run that was stopped or killed; the result is what it would have been."""
    with _friendly():
        options = _options(executor, workers, precision, deterministic, checkpoint_every)
        read_header(folder)
        if is_finished(folder):
            out.print(f"{folder} is finished already")
            return
        _finish(folder, None, options)


@app.command()
def compare(
    source: Source,
    algorithms: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "fedbuff,fadas,fedecho",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    versions: Versions = None,
    settings: Settings = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; by default one per core.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Finished runs in it are kept, stopped ones resumed.")] = None,
) -> None:
    """Run several methods with several seeds, and show them in one table."""
    with _friendly():
        target = folder or Path("runs") / f"compare-{Path(source).stem}"
        plan = [
            Planned(
                f"{algorithm} seed {seed}",
                load(source, algorithm=algorithm, seed=seed, versions=versions, settings=settings or ()),
                target / f"{algorithm}-seed{seed}",
            )
            for seed in _seeds(seeds)
            for algorithm in _names(algorithms)
        ]
        _usable(target)
        with LiveProgress(err) as progress:
            summaries = run_all(plan, jobs=_jobs(jobs), see=progress.update)
        out.print(comparison(summaries, f"{Path(source).stem}: {len(plan)} runs"))
        out.print(f"the runs are in {target}", soft_wrap=True)


def _finish(folder: Path, experiment: Experiment | None, options: dict[str, Any]) -> None:
    """Run, or resume where there is no experiment given, with a progress display; then say what came of it."""
    state = RunState(experiment.num_versions if experiment else read_header(folder)["num_versions"])

    def watch(moment: Moment, scores: dict[str, float] | None) -> None:
        state.see(moment, scores)
        progress.update(folder.name, state)

    with LiveProgress(err) as progress:
        if experiment is not None:
            summary = simulate(experiment, out=folder, watch=watch, say=_say, **options).summary
        else:
            summary = resume_run(folder, watch=watch, say=_say, **options).summary
    out.print(
        f"accuracy {100 * summary.last10_accuracy:.2f} % (mean of the last 10 evaluations; "
        f"final {100 * summary.final_accuracy:.2f}, best {100 * summary.best_accuracy:.2f})",
        soft_wrap=True,
    )
    out.print(f"{summary.virtual_s / 3600:.2f} virtual hours in {summary.real_s:.1f} s; the run is in {folder}", soft_wrap=True)


def _say(text: str) -> None:
    err.print(text, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _friendly() -> Iterator[None]:
    """A user's mistake is one line and exit code 2; a stop on request says how to go on and exits with 130."""
    try:
        yield
    except (ConfigError, CheckpointError, ValueError) as error:
        _fail(str(error), 2)
    except Interrupted as stopped:
        _fail(str(stopped), 130)
    except KeyboardInterrupt:
        _fail("interrupted; a run goes on from its last checkpoint with `fedecho resume`", 130)
    except WorkerError as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"cannot go on: {error}; a run that had begun can be resumed", 2)


def _fail(text: str, code: int) -> None:
    _say(text)
    raise typer.Exit(code)


def _usable(folder: Path) -> None:
    """Is this a place to write to? Said before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder")
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {nearest}: choose another --out")


def _options(executor: str, workers: int | None, precision: str, deterministic: bool, checkpoint_s: float) -> dict[str, Any]:
    """Checked before any work is done."""
    told: Any = {"executor": executor, "workers": workers, "precision": precision, "deterministic": deterministic}
    Execution(**told)
    return {**told, "checkpoint_s": checkpoint_s}


def _free_folder(experiment: Experiment, algorithm: str | None) -> Path:
    """runs/NAME, or the first of NAME-2, NAME-3, ... that holds no run yet."""
    base = Path("runs") / f"{experiment.name}-{algorithm or type(experiment.algorithm).__name__.lower()}-seed{experiment.seed}"
    candidates = (base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 10_000)))
    return next(folder for folder in candidates if not (folder / RECORD).exists())


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--algorithms names no method")
    return list(dict.fromkeys(names))


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--seeds must be whole numbers separated by commas, got {text!r}") from None


def _jobs(jobs: int | None) -> int:
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    return jobs or os.cpu_count() or 1


def _first_line(cls: type[Any]) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def main() -> None:
    app()


if __name__ == "__main__":
    main()

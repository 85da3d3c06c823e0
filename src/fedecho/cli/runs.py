"""``fedecho list``, ``run``, ``resume`` and ``compare``."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedecho.algorithms import ALGORITHMS
from fedecho.cli.console import (
    CheckpointEvery,
    DataDir,
    Deterministic,
    PrecisionOption,
    Settings,
    Source,
    Versions,
    WorkersOption,
    err,
    execution_options,
    friendly,
    numbers,
    out,
    say,
    usable,
    use_data_dir,
)
from fedecho.core.drive import Moment
from fedecho.experiments.compare import Planned, run_all
from fedecho.experiments.config import ConfigError, load
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.folder import tidy_finished
from fedecho.experiments.identity import is_finished
from fedecho.experiments.recipes import RECIPES
from fedecho.experiments.record import RECORD, read_header
from fedecho.experiments.run import CHECKPOINT_S, simulate
from fedecho.experiments.run import resume as resume_run
from fedecho.experiments.state import RunState
from fedecho.report.progress import LiveProgress
from fedecho.report.tables import comparison
from fedecho.simulation.runtimes import PROFILES
from fedecho.tasks import TASKS


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


def run(
    source: Source,
    algorithm: Annotated[str | None, typer.Option(help="Another method than the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of everything random.")] = None,
    versions: Versions = None,
    settings: Settings = None,
    executor: Annotated[str, typer.Option("--executor", help="Where clients train: serial, pool or cuda.")] = "serial",
    workers: WorkersOption = None,
    precision: PrecisionOption = "bf16",
    deterministic: Deterministic = False,
    checkpoint_every: CheckpointEvery = CHECKPOINT_S,
    folder: Annotated[Path | None, typer.Option("--out", help="The run's folder; must not hold a run yet.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run one experiment and record it in a folder."""
    with friendly():
        use_data_dir(data_dir)
        experiment = load(source, algorithm=algorithm, seed=seed, versions=versions, settings=settings or ())
        options = execution_options(executor, workers, precision, deterministic) | {"checkpoint_s": checkpoint_every}
        target = folder or _free_folder(experiment, algorithm)
        usable(target)
        _finish(target, experiment, options)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that was stopped.")],
    executor: Annotated[str | None, typer.Option("--executor", help="By default, where it ran before.")] = None,
    workers: WorkersOption = None,
    checkpoint_every: CheckpointEvery = CHECKPOINT_S,
    data_dir: DataDir = None,
) -> None:
    """Go on with a run that was stopped or killed; the result is what it would have been."""
    with friendly():
        use_data_dir(data_dir)
        before = read_header(folder)["execution"]
        if before.get("executor") == "flower" and not is_finished(folder):
            raise ConfigError(
                f"{folder} holds a run over a network: it goes on when its app is submitted again (fedecho submit)"
            )
        if is_finished(folder):
            tidy_finished(folder, say)
            out.print(f"{folder} is finished already")
            return
        options = execution_options(
            executor or before.get("executor", "serial"),
            workers,
            before.get("precision", "bf16"),
            before.get("deterministic", False),
        )
        _finish(folder, None, options | {"checkpoint_s": checkpoint_every})


def compare(
    source: Source,
    algorithms: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "fedbuff,fadas,fedecho",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    versions: Versions = None,
    settings: Settings = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; by default one per core.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Finished runs in it are kept, stopped ones resumed.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run several methods with several seeds, and show them in one table."""
    with friendly():
        use_data_dir(data_dir)
        target = folder or Path("runs") / f"compare-{Path(source).stem}"
        plan = [
            Planned(
                f"{algorithm} seed {seed}",
                load(source, algorithm=algorithm, seed=seed, versions=versions, settings=settings or ()),
                target / f"{algorithm}-seed{seed}",
            )
            for seed in numbers(seeds, "--seeds")
            for algorithm in _names(algorithms)
        ]
        usable(target)
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
            summary = simulate(experiment, out=folder, watch=watch, say=say, **options).summary
        else:
            summary = resume_run(folder, watch=watch, say=say, **options).summary
    out.print(
        f"accuracy {100 * summary.last10_accuracy:.2f} % (mean of the last 10 evaluations; "
        f"final {100 * summary.final_accuracy:.2f}, best {100 * summary.best_accuracy:.2f})",
        soft_wrap=True,
    )
    out.print(f"{summary.virtual_s / 3600:.2f} virtual hours in {summary.real_s:.1f} s; the run is in {folder}", soft_wrap=True)


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


def _jobs(jobs: int | None) -> int:
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    return jobs or os.cpu_count() or 1


def _first_line(cls: type[Any]) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]

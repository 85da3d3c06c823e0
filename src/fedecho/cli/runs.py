"""``fedecho list``, ``run``, ``resume`` and ``export``."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedecho.cli import console
from fedecho.cli.catalog import ALGORITHMS, CHECKPOINT_S, PROFILES, RECIPES, TASKS
from fedecho.cli.console import DEFAULT, err, one_line_errors, out, print_json, print_line, say
from fedecho.core.ranges import SEEDS
from fedecho.report.terminal import LiveProgress
from fedecho.runs.record import read_header
from fedecho.runs.summary import Summary, is_finished
from fedecho.tracking import check_sinks, tracked

if TYPE_CHECKING:
    from fedecho.runs.experiment import Experiment


def list_all(as_json: console.AsJson = False) -> None:
    """List recipes, algorithms, tasks and runtime profiles."""
    if as_json:
        print_json({"recipes": RECIPES, "algorithms": ALGORITHMS, "tasks": TASKS, "profiles": PROFILES})
        return
    tables = {
        "[bold]recipes[/] (fedecho run NAME)": RECIPES,
        "[bold]algorithms[/] (--algorithm NAME)": ALGORITHMS,
        "[bold]tasks[/] (task.name)": TASKS,
    }
    for heading, summaries in tables.items():
        out.print(heading)
        for name, summary in summaries.items():
            out.print(f"  {name:12} {summary}", soft_wrap=True, markup=False)
    out.print(f"[bold]runtime profiles[/] (--set runtimes.profile=NAME)\n  {', '.join(PROFILES)}")


def run(
    source: console.Source,
    algorithm: console.AlgorithmOption = None,
    seed: Annotated[int | None, SEEDS, typer.Option(help="The random seed.")] = None,
    versions: console.VersionsOption = None,
    settings: console.Settings = None,
    executor: console.ExecutorOption = "serial",
    workers: console.WorkersOption = None,
    device: console.DeviceOption = None,
    address: console.AddressOption = None,
    precision: console.PrecisionOption = "bf16",
    deterministic: console.Deterministic = False,
    checkpoint_every: console.CheckpointEvery = CHECKPOINT_S,
    folder: Annotated[
        Path | None, typer.Option("--out", click_type=console.USER_PATH, help="The run's folder; must not contain a run yet.")
    ] = None,
    data_dir: console.DataDir = None,
    track: console.Track = None,
    quiet: console.Quiet = False,
    as_json: console.AsJson = False,
) -> None:
    """Run one experiment and record it in a folder.

    `fedecho run digits --algorithm fedbuff --out runs/first` takes seconds on a laptop. Ctrl-C stops it;
    `fedecho resume runs/first` continues. `fedecho watch runs/first` shows it in a browser while it runs,
    `fedecho report runs/first` afterwards.
    """
    with one_line_errors() as work, ExitStack() as stack:
        from fedecho.runs.config import load
        from fedecho.runs.folder import new_folder

        console.use_data_dir(data_dir)
        check_sinks(track or ())
        experiment = load(source, algorithm=algorithm, seed=seed, versions=versions, settings=settings or ())
        options = console.execution_options(executor, workers, precision, deterministic, device, address)
        options |= {"checkpoint_s": checkpoint_every}
        console.check_writable(folder or DEFAULT)
        target = work.folder = folder or stack.enter_context(new_folder(DEFAULT / _name(experiment, algorithm)))
        _finish(target, experiment, options, _Output(tuple(track or ()), quiet, as_json))


def resume(
    folder: Annotated[
        Path, typer.Argument(click_type=console.USER_PATH, metavar="DIR", help="The folder of an interrupted run.")
    ],
    executor: Annotated[str | None, typer.Option("--executor", help="Default: the executor it ran on before.")] = None,
    workers: console.WorkersOption = None,
    address: console.AddressOption = None,
    other_software: console.OtherSoftware = False,
    checkpoint_every: console.CheckpointEvery = CHECKPOINT_S,
    data_dir: console.DataDir = None,
    track: console.Track = None,
    quiet: console.Quiet = False,
    as_json: console.AsJson = False,
) -> None:
    """Resume an interrupted run; the result is the same as without the interruption."""
    with one_line_errors() as work:
        from fedecho.runs.folder import resumable

        work.folder = folder
        console.use_data_dir(data_dir)
        check_sinks(track or ())
        output = _Output(tuple(track or ()), quiet, as_json)
        if is_finished(folder):
            _say_finished(folder, output)
            return
        options = _as_before(resumable(folder)["execution"], executor, workers, address)
        options |= {"checkpoint_s": checkpoint_every, "other_software": other_software}
        _finish(folder, None, options, output)


def export(
    folder: Annotated[Path, typer.Argument(click_type=console.USER_PATH, metavar="DIR", help="The folder of a finished run.")],
    target: Annotated[Path, typer.Option("--out", click_type=console.USER_PATH, help="A new folder for the model.")],
    data_dir: console.DataDir = None,
    quiet: console.Quiet = False,
) -> None:
    """Export a run's model in its task's format: for text tasks a transformers folder, with LoRA merged."""
    with one_line_errors():
        console.use_data_dir(data_dir)
        console.check_writable(target)
        from fedecho.runs.trained import export as export_run

        export_run(folder, target)
        if quiet:
            print(target)
        else:
            print_line(
                f"the model of {folder} is in {target}: load it with from_pretrained, or train it further with task.model={target}"
            )


@dataclass(frozen=True)
class _Output:
    """Where a command's output goes: quiet, JSON or text, and metric sinks."""

    track: tuple[str, ...]
    quiet: bool
    as_json: bool

    @property
    def silent(self) -> bool:
        return self.quiet or self.as_json


def _say_finished(folder: Path, output: _Output) -> None:
    from fedecho.runs.folder import is_deployed, tidy_finished

    header = read_header(folder)
    tidy_finished(folder, say)
    if output.as_json:
        print_json({"folder": str(folder), **asdict(Summary.read(folder))})
    elif is_deployed(header):
        print_line(f"{folder} is already finished; to run its app again, submit it with another run folder")
    else:
        print_line(f"{folder} is already finished")


def _as_before(before: dict[str, Any], executor: str | None, workers: int | None, address: str | None) -> dict[str, Any]:
    from fedecho.runs.execution import resume_options

    options = resume_options(before, executor)
    if address is None and executor is None and options["executor"] == "ray":  # an explicit --executor ray is a local cluster
        address = before.get("address")
    return console.execution_options(**options, workers=workers, address=address)


def _finish(folder: Path, experiment: "Experiment | None", options: dict[str, Any], output: _Output) -> None:
    """Run an experiment, or resume the folder's run if none is given, with a progress display; then print the result."""
    from fedecho.runs.identity import config_of
    from fedecho.runs.run import resume as resume_run
    from fedecho.runs.run import simulate
    from fedecho.runs.run_stats import ProgressWatch, RunState

    if experiment is not None:
        num_versions, config = experiment.num_versions, config_of(experiment)
    else:
        header = read_header(folder)
        num_versions, config = header["num_versions"], header["config"]
    state = RunState(num_versions)
    with LiveProgress(err, silent=output.silent) as progress, tracked(output.track, folder, config, say) as tracker:
        watch = ProgressWatch(folder, state, partial(progress.update, folder.name), also=tracker)
        if experiment is not None:
            progress.update(folder.name, state)  # the first client may take long
            summary = simulate(experiment, out=folder, watch=watch, say=say, **options).summary
        else:
            summary = resume_run(folder, watch=watch, say=say, **options).summary
    _say_result(folder, summary, output)


def _say_result(folder: Path, summary: Summary, output: _Output) -> None:
    if output.as_json:
        print_json({"folder": str(folder), **asdict(summary)})
        return
    if output.quiet:
        print(folder)
        return
    out.print(
        f"accuracy {100 * summary.last10_accuracy:.2f} % (mean of the last evaluations, at most 10; "
        f"final {100 * summary.final_accuracy:.2f}, best {100 * summary.best_accuracy:.2f})",
        soft_wrap=True,
    )
    scores = [f"{name} {value:.4g}" for name, value in summary.scores.items() if name != "accuracy"]
    judged = [f"judged on {summary.notes['judged on']}"] if "judged on" in summary.notes else []
    if scores or judged:
        print_line("; ".join([", ".join(scores), *judged] if scores else judged))
    print_line(f"{summary.virtual_s / 3600:.2f} virtual hours in {summary.real_s:.1f} s; the run is in {folder}")
    print_line(f"for a page of results: fedecho report {folder}")


def _name(experiment: "Experiment", algorithm: str | None) -> str:
    return f"{experiment.name}-{algorithm or type(experiment.algorithm).__name__.lower()}-seed{experiment.seed}"

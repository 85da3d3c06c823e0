"""``fedecho compare``."""

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedecho.cli import console
from fedecho.cli.complete import complete_algorithms
from fedecho.cli.console import DEFAULT, err, one_line_errors, out, print_json, print_line, say
from fedecho.report.terminal import LiveProgress, comparison
from fedecho.runs.record import RECORD
from fedecho.runs.suggestions import ConfigError
from fedecho.tracking import check_sinks

if TYPE_CHECKING:
    from fedecho.runs.compare import ComparisonResult


def compare(
    source: console.Source,
    algorithms: Annotated[
        str, typer.Option(help="Comma-separated methods.", autocompletion=complete_algorithms)
    ] = "fedbuff,fadas,fedecho",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0,1,2",
    versions: console.VersionsOption = None,
    settings: console.Settings = None,
    jobs: Annotated[
        int | None, console.JOBS, typer.Option(help="Number of parallel runs. Default: one per core with serial, otherwise 1.")
    ] = None,
    executor: console.ExecutorOption = "serial",
    workers: console.WorkersOption = None,
    device: console.DeviceOption = None,
    address: console.AddressOption = None,
    precision: console.PrecisionOption = "bf16",
    deterministic: console.Deterministic = False,
    other_software: console.OtherSoftware = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            click_type=console.USER_PATH,
            help="Folder for the runs. Finished runs in it are kept, stopped ones resumed.",
        ),
    ] = None,
    data_dir: console.DataDir = None,
    track: console.Track = None,
    quiet: console.Quiet = False,
    as_json: console.AsJson = False,
) -> None:
    """Run several methods with several seeds and compare them in one table.

    Interrupt it at any time: the same command continues. `fedecho report FOLDER` builds a page of the results.
    """
    with one_line_errors() as work, ExitStack() as stack:
        from fedecho.runs.compare import PlannedRun, method_specific_settings, run_all, settings_of_methods
        from fedecho.runs.config import load
        from fedecho.runs.folder import unused_folder

        console.use_data_dir(data_dir)
        check_sinks(track or ())
        methods, given = console.split_methods(algorithms), settings or []
        settings_by_method = settings_of_methods(source, methods, given)
        execution = console.execution_options(executor, workers, precision, deterministic, device, address, other_software)
        experiments = {
            (name, seed): load(source, algorithm=name, seed=seed, versions=versions, settings=settings_by_method[name])
            for seed in console.split_seeds(seeds)
            for name in methods
        }
        console.check_writable(folder or DEFAULT)
        target = work.folder = folder or stack.enter_context(unused_folder(DEFAULT / f"compare-{Path(source).stem}", say))
        plan = [
            PlannedRun(f"{name} seed {seed}", experiment, target / f"{name}-seed{seed}", tuple(track or ()), execution)
            for (name, seed), experiment in experiments.items()
        ]
        console.check_writable(target)
        if (target / RECORD).exists():
            raise ConfigError(f"{target} holds a single run, but a comparison needs a folder of runs: choose another --out")
        for line in () if quiet else method_specific_settings(settings_by_method, given):
            say(line)
        with LiveProgress(err, silent=quiet or as_json) as progress:
            at_once = jobs or (os.cpu_count() if executor == "serial" else 1) or 1  # others use the whole machine for one run
            compared = run_all(plan, jobs=at_once, see=progress.update, say=say)
        _show(compared, target, f"{Path(source).stem}: {len(plan)} runs", quiet=quiet, as_json=as_json)


def _show(compared: "ComparisonResult", target: Path, title: str, *, quiet: bool, as_json: bool) -> None:
    for label, why in compared.diverged.items():
        say(f"{label} diverged: {why}")
    if not compared.summaries:
        raise ConfigError(f"none of the runs finished; to try again, remove {target}")
    if as_json:
        print_json({"folder": str(target), "runs": list(map(asdict, compared.summaries)), "diverged": compared.diverged})
        return
    if quiet:
        print(target)
        return
    diverged = Counter(label.partition(" seed ")[0] for label in compared.diverged)
    out.print(comparison(compared.summaries, title, diverged))
    print_line(f"the runs are in {target}; for a page of results: fedecho report {target}")

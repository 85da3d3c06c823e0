"""``fedecho table`` and ``fedecho cost``."""

import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedecho.cli import console
from fedecho.cli.catalog import CHECKPOINT_S
from fedecho.cli.complete import complete_executor
from fedecho.cli.console import err, one_line_errors, out, print_line, say
from fedecho.core.ranges import Versions
from fedecho.paper.rendering import View, as_csv, as_markdown, as_text, notes_of
from fedecho.paper.results import read_result
from fedecho.paper.tables import Cell, PaperTable
from fedecho.paper.text_tables import TABLES, first_of
from fedecho.report.terminal import LiveProgress
from fedecho.runs.suggestions import ConfigError

RESULTS = Path("results")
WIDE = 160


def table(
    name: Annotated[str, typer.Argument(metavar="|".join(TABLES), help="A table of the paper, or one of ours on digits.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only cells whose name contains this word, or any of a,b. Repeat to require several."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Skip cells whose name contains this word, or any of a,b; repeatable.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated seeds (default: those of the committed results).")] = None,
    settings: console.Settings = None,
    jobs: Annotated[
        int, console.JOBS, typer.Option(help="Number of parallel cells, each in its own process; they share one GPU.")
    ] = 1,
    executor: Annotated[
        str | None,
        typer.Option(help="serial, pool, cuda or ray (default: cuda; serial on digits).", autocompletion=complete_executor),
    ] = None,
    workers: console.WorkersOption = None,
    device: console.DeviceOption = None,
    address: console.AddressOption = None,
    precision: console.PrecisionOption = "bf16",
    deterministic: console.Deterministic = False,
    other_software: console.OtherSoftware = False,
    checkpoint_every: console.CheckpointEvery = CHECKPOINT_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells that would run, with estimated times.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show the existing results without running anything.")] = False,
    by_seed: Annotated[bool, typer.Option("--by-seed", help="Show each seed's value next to the mean.")] = False,
    form: Annotated[str, typer.Option("--format", help="Output format: text, markdown or csv.")] = "text",
    results: Annotated[Path, typer.Option(click_type=console.USER_PATH, help="Folder of results.")] = RESULTS,
    runs: Annotated[Path, typer.Option(click_type=console.USER_PATH, help="Folder of runs.")] = Path("runs") / "tables",
    data_dir: console.DataDir = None,
) -> None:
    """Run the missing cells of a table and show our results, next to the paper's if it has such a table."""
    with one_line_errors() as work:
        console.use_data_dir(data_dir)
        _check_settings(settings or [], results)
        _check_choices(name, form, show, dry_run, results)
        paper = replace(TABLES[name], own=tuple(settings or ()))
        chosen = console.split_seeds(seeds) if seeds is not None else paper.seeds
        cells = _picked(paper, chosen, only or [], without or [])
        if not show:
            options = console.execution_options(
                executor or paper.executor, workers, precision, deterministic, device, address, other_software
            )
            missing = _missing(cells, results)
            if dry_run:
                _announce(paper, missing, results, chosen)
                return
            if missing:
                from fedecho.paper.filling import CellRunner, fill

                console.check_writable(results)
                work.is_resumable = True
                filling = CellRunner(results=results, runs=runs, options=options, checkpoint_s=checkpoint_every)
                with LiveProgress(err) as progress:
                    fill(filling, missing, jobs=jobs, see=progress.update, say=say)
        picked = tuple(seed for seed in chosen if any(cell.seed == seed for cell in cells))
        _show(View(_narrowed(paper, cells), results, picked, by_seed), form)


def cost(
    source: console.Source,
    algorithms: Annotated[str, typer.Option(help="Comma-separated methods.")] = "fedbuff,ca2fl,fedac,fadas,fedecho",
    versions: Annotated[Versions, typer.Option("--versions", "--num-versions", help="Number of versions to measure.")] = 10,
    settings: console.Settings = None,
    executor: console.ExecutorOption = "serial",
    data_dir: console.DataDir = None,
) -> None:
    """Measure each method's cost to the server: time per version, versions held and memory."""
    with one_line_errors():
        import torch

        from fedecho.runs.compare import method_specific_settings, settings_of_methods
        from fedecho.runs.config import load
        from fedecho.runs.estimates import server_cost
        from fedecho.runs.execution import Execution

        console.use_data_dir(data_dir)
        execution = Execution(**console.execution_options(executor, None, "bf16", False))
        title = Text(f"{source}: what the server pays, by version")
        shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("method", "infer s", "distil s", "alive", "versions MB", "bank MB", "state MB"):
            shown.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        settings_by_method = settings_of_methods(source, console.split_methods(algorithms), settings or [])
        for line in method_specific_settings(settings_by_method, settings or []):
            say(line)
        for name, own in settings_by_method.items():
            experiment = load(source, algorithm=name, settings=own)
            say(f"measuring {name} over {versions} versions")
            paid = server_cost(experiment, execution, versions)
            seconds = [f"{paid.inference_s:.4f}", f"{paid.distillation_s:.4f}"]
            megabytes = [paid.versions_bytes / 1e6, paid.bank_bytes / 1e6, paid.state_bytes / 1e6]
            held = [str(paid.versions_alive), *(f"{each:.2f}" for each in megabytes)]
            shown.add_row(name, *seconds, *held)
        out.print(shown)
        place = f"{torch.cuda.get_device_name()}, {execution.precision}" if execution.executor == "cuda" else "CPU"
        print_line(
            f"{place}, torch {torch.__version__}; seconds are the server's, mean over --versions {versions} after one; "
            "alive: the most versions at once by the schedule of the whole run; bank and state: of all clients"
        )


def _check_choices(name: str, form: str, show: bool, dry_run: bool, results: Path) -> None:
    if name not in TABLES:
        raise ConfigError(f"unknown table {name!r}: it must be one of {', '.join(TABLES)}")
    if form not in ("text", "markdown", "csv"):
        raise ConfigError(f"--format must be text, markdown or csv, got {form!r}")
    if show and dry_run:
        raise ConfigError("--show lists existing results and --dry-run missing ones: choose one")
    if show and not results.is_dir():
        raise ConfigError(f"there is no folder {results.absolute()}: give the folder of results with --results")


def _check_settings(settings: list[str], results: Path) -> None:
    if settings and results == RESULTS:
        raise ConfigError("--set changes the paper's cells: keep their results apart with --results FOLDER")
    if any(setting.partition("=")[0].strip() == "seed" for setting in settings):
        raise ConfigError("--set seed=... has no effect on a table: use --seeds")


def _picked(paper: PaperTable, seeds: tuple[int, ...], only: list[str], without: list[str]) -> list[Cell]:
    """The cells whose names contain a word of each ``only`` and no word of any ``without``."""
    cells = [cell for cell in paper.cells(seeds) if all(_has(cell, words) for words in only)]
    cells = [cell for cell in cells if not any(_has(cell, words) for words in without)]
    if not cells:
        wanted = [" and ".join(only), *([f"not {' or '.join(without)}"] if without else [])]
        raise ConfigError(
            f"{paper.name} has no cell whose name contains {' but '.join(filter(None, wanted))}; `--dry-run` lists the names"
        )
    for cell in cells if paper.own else ():
        cell.experiment()  # the user's settings must be valid; it imports torch
    return cells


def _has(cell: Cell, words: str) -> bool:
    """Whether the cell's name contains any of the comma-separated words."""
    return any(word.strip() in cell.slug for word in words.lower().split(",") if word.strip())


def _narrowed(paper: PaperTable, cells: list[Cell]) -> PaperTable:
    """The table, reduced to the rows and columns of these cells."""
    rows, columns = {cell.row for cell in cells}, {cell.column for cell in cells}
    return replace(
        paper,
        rows=tuple(row for row in paper.rows if row in rows),
        columns=tuple(column for column in paper.columns if column in columns),
    )


def _missing(cells: list[Cell], results: Path) -> list[Cell]:
    """Cells without a result. Of cells that share an experiment, only the first."""
    missing: dict[Cell, Cell] = {}
    for cell in cells:
        if read_result(results, cell) is None:
            missing.setdefault(first_of(cell), cell)
    return list(missing.values())


def _announce(paper: PaperTable, missing: list[Cell], results: Path, seeds: tuple[int, ...]) -> None:
    methods = {cell.row.algorithm for cell in missing}
    rows = tuple(row for row in paper.rows if row.algorithm in methods)
    seconds, places = _times(replace(paper, rows=rows), results, seeds)
    total, unknown = 0.0, 0
    for cell in missing:
        rate = seconds.get(_kind(cell))
        guess = None if rate is None else rate * (1 if cell.row.untrained else cell.config()["num_versions"])
        total, unknown = total + (guess or 0.0), unknown + (guess is None)
        out.print(f"{cell.slug}  {'?' if guess is None else f'{guess:.0f} s'}", soft_wrap=True, highlight=False)
    line = f"{len(missing)} cell{'' if len(missing) == 1 else 's'} to run"
    if unknown < len(missing):
        line += f": {total / 60:.0f} min by the times of earlier runs ({', '.join(places)})"
    out.print(line + (f", {unknown} of unknown length" if unknown else ""), soft_wrap=True)


def _times(paper: PaperTable, results: Path, seeds: tuple[int, ...]) -> tuple[dict[Any, float], list[str]]:
    """Wall-clock seconds per version (or per evaluation of untrained cells) of finished cells by kind, and the devices used."""
    seen: dict[Any, list[float]] = {}
    places: set[str] = set()
    for cell in paper.cells(seeds if paper.own else tuple(sorted({*seeds, *paper.seeds}))):
        result = read_result(results, cell)
        if result is not None and not result.diverged:
            seen.setdefault(_kind(cell), []).append(result.summary["real_s"] / (result.summary["num_versions"] or 1))
            places.add(result.execution.get("device", "CPU"))
    return {kind: fmean(times) for kind, times in seen.items()}, sorted(places)


def _kind(cell: Cell) -> tuple[str, bool, str]:
    """The properties that determine most of a cell's running time."""
    return cell.row.algorithm, cell.row.untrained, cell.config()["task"].get("model", "")


def _show(view: View, form: str) -> None:
    if form == "text":
        # Without a terminal rich wraps to 80 columns, which would break words in files.
        printer = out if out.is_terminal or os.environ.get("COLUMNS") else Console(width=WIDE)
        for shown in as_text(view):
            printer.print(shown)
        for note in notes_of(view):
            print_line(note)
    else:
        print(as_markdown(view) if form == "markdown" else as_csv(view))

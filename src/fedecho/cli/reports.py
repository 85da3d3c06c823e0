"""``fedecho report``, ``fedecho watch`` and ``fedecho schedule``."""

import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedecho.cli import console
from fedecho.cli.console import one_line_errors, out, print_json, print_line, say
from fedecho.core.ranges import between
from fedecho.report.live import LOOPBACK, serve
from fedecho.report.page import page, report_of
from fedecho.report.paper_figures import write_figures
from fedecho.runs.suggestions import ConfigError
from fedecho.storage.files import write_atomically

if TYPE_CHECKING:
    from fedecho.runs.estimates import ClassReports, Schedule

Folders = Annotated[
    list[Path],
    typer.Argument(click_type=console.USER_PATH, metavar="DIR...", help="Run folders, or folders that contain run folders."),
]
OpenIt = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]


def report(
    folders: Folders,
    target: Annotated[
        Path | None,
        typer.Option("--out", click_type=console.USER_PATH, help="The HTML file or its folder. Default: the first DIR."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            click_type=console.USER_PATH,
            metavar="DIR",
            help="Also write every figure as PNG and SVG to this folder.",
        ),
    ] = None,
    open_it: OpenIt = False,
    quiet: console.Quiet = False,
    as_json: console.AsJson = False,
) -> None:
    """Build one HTML page from any number of runs: curves, clients, staleness, teachers, classes, costs.

    The page is a single file that works offline. Unfinished runs are included.
    """
    with one_line_errors():
        made = report_of(folders)
        target = _page_at(target or folders[0])
        for folder in (target.parent, *([] if figures is None else [figures])):
            console.check_writable(folder)
        text = page(made).encode(errors="replace")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
        drawn = write_figures(made, figures) if figures is not None else []
        missing = [why for section in made.sections for why in section.missing]
        if as_json:
            result = {"page": str(target), "bytes": len(text), "figures": [figure.slug for figure in made.figures]}
            print_json(result | {"left_out": missing, "files": [str(path) for path in drawn]})
        elif quiet:
            print(target)
        else:
            print_line(f"{target} ({len(text) / 1e6:.1f} MB, {len(made.figures)} figures)")
            for why in missing:
                print_line(f"left out: {why}")
            if drawn:
                print_line(f"{len(drawn)} files in {figures}")
        if open_it:
            webbrowser.open(target.absolute().as_uri())


def _page_at(target: Path) -> Path:
    """The path of the page, given a file or a folder. Never overwrites a file of another kind."""
    if target.is_dir() or (not target.suffix and not target.exists()):
        return target / "report.html"
    if target.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {target} is neither a page nor a folder: give a folder or a name that ends in .html")
    return target


def watch(
    folders: Folders,
    port: Annotated[int, between(0, 65535), typer.Option(help="Local port; 0 picks a free one.")] = 8765,
    open_it: OpenIt = False,
) -> None:
    """Serve a live report while runs are in progress; stop with Ctrl-C.

    The server listens on 127.0.0.1 only and never writes to the folders.
    From another machine: `ssh -L 8765:127.0.0.1:8765 HOST`
    """
    with one_line_errors():
        server = serve(folders, port)
        address = f"http://{LOOPBACK}:{server.server_port}/"
        say(f"{address} shows {', '.join(map(str, folders))}; stop with Ctrl-C")
        if open_it:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("no longer watching; the runs continue")
        finally:
            server.server_close()


HEADINGS = ("class", "clients", "reports", "first reports", "silent", "mean staleness", "largest")


def schedule(
    source: console.Source,
    algorithm: console.AlgorithmOption = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated seeds. Default: the experiment's.")] = None,
    versions: console.VersionsOption = None,
    settings: console.Settings = None,
    data_dir: console.DataDir = None,
    as_json: console.AsJson = False,
) -> None:
    """Predict when each class of clients will report, without training anything.

    Shows whether stragglers report at all within these versions. The schedule depends only on random draws,
    so the run has the same one unless updates are rejected.
    """
    with one_line_errors():
        from fedecho.runs.config import load
        from fedecho.runs.estimates import schedule_of

        console.use_data_dir(data_dir)
        wanted = [None] if seeds is None else list(console.split_seeds(seeds))
        schedules = {}
        for seed in wanted:
            experiment = load(source, algorithm=algorithm, seed=seed, versions=versions, settings=settings or ())
            schedules[experiment.seed] = schedule_of(experiment)
        if as_json:
            print_json({"schedules": [{"seed": seed, **asdict(each)} for seed, each in schedules.items()]})
            return
        for seed, each in schedules.items():
            _show(f"{experiment.name}, seed {seed}", each)
        print_line(
            "first reports: the versions that include the first updates of a class's clients; silent: clients that never report"
        )


def _show(label: str, schedule: "Schedule") -> None:
    length = f"{schedule.num_versions} versions take {schedule.virtual_s:.0f} virtual s"
    print_line(f"{label}: {length}, at most {schedule.versions_alive} alive at once")
    shown = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == "class" else "right", no_wrap=True)
    for each in schedule.classes:
        shown.add_row(*_cells(each))
    out.print(shown)


def _cells(each: "ClassReports") -> list[str]:
    counts = [each.name, str(each.num_clients), str(each.num_reports)]
    if each.first_version is None:
        return [*counts, "-", str(each.never_heard), "-", "-"]
    first, last = each.first_version, each.last_first_version
    heard = str(first) if first == last else f"{first} to {last}"
    return [*counts, heard, str(each.never_heard), f"{each.mean_staleness:.1f}", str(each.max_staleness)]

"""``fedecho report``, ``fedecho watch`` and ``fedecho schedule``."""

import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedecho.cli.complete import complete_algorithm
from fedecho.cli.console import (
    PLACE,
    AsJson,
    DataDir,
    Quiet,
    Settings,
    Source,
    VersionsOption,
    friendly,
    numbers,
    out,
    print_json,
    say,
    tell,
    usable,
    use_data_dir,
)
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
    typer.Argument(click_type=PLACE, metavar="DIR...", help="Run folders, or folders that contain run folders."),
]
OpenIt = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]


def report(
    folders: Folders,
    target: Annotated[
        Path | None, typer.Option("--out", click_type=PLACE, help="The HTML file or its folder. Default: the first DIR.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", click_type=PLACE, metavar="DIR", help="Also write every figure as PNG and SVG to this folder."
        ),
    ] = None,
    open_it: OpenIt = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Build one HTML page from any number of runs: curves, clients, staleness, teachers, classes, costs.

    The page is a single file that works offline. Unfinished runs are included.
    """
    with friendly():
        made = report_of(folders)
        target = _page_at(target or folders[0])
        for folder in (target.parent, *([] if figures is None else [figures])):
            usable(folder)
        text = page(made).encode(errors="replace")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
        drawn = write_figures(made, figures) if figures is not None else []
        missing = [why for section in made.sections for why in section.missing]
        if as_json:
            told = {"page": str(target), "bytes": len(text), "figures": [figure.slug for figure in made.figures]}
            print_json(told | {"left_out": missing, "files": [str(path) for path in drawn]})
        elif quiet:
            print(target)
        else:
            tell(f"{target} ({len(text) / 1e6:.1f} MB, {len(made.figures)} figures)")
            for why in missing:
                tell(f"left out: {why}")
            if drawn:
                tell(f"{len(drawn)} files in {figures}")
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
    with friendly():
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
    source: Source,
    algorithm: Annotated[
        str | None, typer.Option(help="Use this method instead of the recipe's.", autocompletion=complete_algorithm)
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated seeds. Default: the experiment's.")] = None,
    versions: VersionsOption = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Predict when each class of clients will report, without training anything.

    Shows whether stragglers report at all within these versions. The schedule depends only on random draws,
    so the run has the same one unless updates are rejected.
    """
    with friendly():
        from fedecho.runs.config import load
        from fedecho.runs.estimates import schedule_of

        use_data_dir(data_dir)
        wanted = [None] if seeds is None else list(numbers(seeds, "--seeds"))
        found = {}
        for seed in wanted:
            experiment = load(source, algorithm=algorithm, seed=seed, versions=versions, settings=settings or ())
            found[experiment.seed] = schedule_of(experiment)
        if as_json:
            print_json({"schedules": [{"seed": seed, **asdict(each)} for seed, each in found.items()]})
            return
        for seed, each in found.items():
            _show(f"{experiment.name}, seed {seed}", each)
        tell(
            "first reports: the versions that include the first updates of a class's clients; silent: clients that never report"
        )


def _show(label: str, found: "Schedule") -> None:
    length = f"{found.num_versions} versions take {found.virtual_s:.0f} virtual s"
    tell(f"{label}: {length}, at most {found.versions_alive} alive at once")
    shown = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == "class" else "right", no_wrap=True)
    for each in found.classes:
        shown.add_row(*_cells(each))
    out.print(shown)


def _cells(each: "ClassReports") -> list[str]:
    counts = [each.name, str(each.num_clients), str(each.num_reports)]
    if each.first_version is None:
        return [*counts, "-", str(each.never_heard), "-", "-"]
    first, last = each.first_version, each.last_first_version
    heard = str(first) if first == last else f"{first} to {last}"
    return [*counts, heard, str(each.never_heard), f"{each.mean_staleness:.1f}", str(each.max_staleness)]

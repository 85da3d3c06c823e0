"""``fedecho schedule``."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedecho.cli.complete import complete_algorithm
from fedecho.cli.console import (
    AsJson,
    DataDir,
    Settings,
    Source,
    VersionsOption,
    friendly,
    numbers,
    out,
    print_json,
    tell,
    use_data_dir,
)
from fedecho.experiments.config import load
from fedecho.experiments.schedule import ClassReports, Schedule, schedule_of

HEADINGS = ("class", "clients", "reports", "first reports", "silent", "mean staleness", "largest")


def schedule(
    source: Source,
    algorithm: Annotated[
        str | None, typer.Option(help="Another method than the recipe's.", autocompletion=complete_algorithm)
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas; by default the experiment's.")] = None,
    versions: VersionsOption = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Say who will report when, before anything is trained: do stragglers report within these versions at all?

    A schedule hangs on draws alone, not on what is learnt, so it is that of the run (but for updates that are rejected).
    """
    with friendly():
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
            "first reports: the versions that the first updates of a class's clients go into; silent: clients that do not report"
        )


def _show(label: str, found: Schedule) -> None:
    length = f"{found.num_versions} versions take {found.virtual_s:.0f} virtual s"
    tell(f"{label}: {length}, at most {found.versions_alive} alive at once")
    shown = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == "class" else "right", no_wrap=True)
    for each in found.classes:
        shown.add_row(*_cells(each))
    out.print(shown)


def _cells(each: ClassReports) -> list[str]:
    counts = [each.name, str(each.num_clients), str(each.num_reports)]
    if each.first_version is None:
        return [*counts, "-", str(each.never_heard), "-", "-"]
    first, last = each.first_version, each.last_first_version
    heard = str(first) if first == last else f"{first} to {last}"
    return [*counts, heard, str(each.never_heard), f"{each.mean_staleness:.1f}", str(each.max_staleness)]

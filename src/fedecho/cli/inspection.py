"""``fedecho inspect``."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedecho.cli.console import (
    USER_PATH,
    AsJson,
    DataDir,
    one_line,
    one_line_errors,
    out,
    print_json,
    print_line,
    say,
    use_data_dir,
)
from fedecho.core.ranges import at_least

if TYPE_CHECKING:
    from fedecho.runs.inspection import InspectedU


def inspect(
    folder: Annotated[
        Path, typer.Argument(click_type=USER_PATH, metavar="DIR", help="The folder of a finished run of FedEcho.")
    ],
    unlabeled: Annotated[
        list[str] | None,
        typer.Option(
            "--unlabeled",
            metavar="NAME|KEY=VALUE,...",
            help="Another U: a value of task.unlabeled, or settings of the task. Repeatable.",
        ),
    ] = None,
    clients: Annotated[int, at_least(1, most=10**5), typer.Option("--clients", help="The most clients to train.")] = 20,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show whether a run's unlabeled data is good enough, beside other candidates.

    Each client trains once from the run's final model, on this machine's CPU, and predicts on every U. Then a few
    buffers of them take a step, followed by distillation; accuracy is that of the held-out data before and after.
    """
    with one_line_errors():
        use_data_dir(data_dir)
        from fedecho.runs.inspection import inspect_run

        found = inspect_run(folder, unlabeled or (), clients, (lambda text: None) if as_json else _progress())
        if as_json:
            print_json({"folder": str(folder), "unlabeled": [asdict(each) | {"verdict": each.verdict} for each in found]})
            return
        out.print(_table(found))
        for each in found:
            print_line(f"{each.unlabeled}: {each.verdict}")


PAUSE_S = 5.0
"""The shortest time between two lines of progress."""


def _progress() -> Callable[[str], None]:
    said_at = -PAUSE_S

    def progress(text: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= PAUSE_S:
            said_at = time.monotonic()
            say(text)

    return progress


ROWS: dict[str, Callable[["InspectedU"], str]] = {
    "rows of U": lambda each: f"{each.rows:,}",
    "teacher's entropy (0 certain, 1 uniform)": lambda each: f"{each.entropy:.2f}",
    "balance of its classes (1 even)": lambda each: f"{each.balance:.2f}",
    "fewest teachers": lambda each: f"class {each.least_class}: {each.least_coverage} of {each.num_clients}",
    "agreement with the teacher": lambda each: f"{100 * each.agreement:.0f} %",
    "  of the client with the lowest": lambda each: f"{100 * each.lowest_agreement:.0f} %",
    "distillation's step by the buffer's": lambda each: f"{each.shift:.2g}",
    "accuracy before distillation": lambda each: f"{100 * each.accuracy_before:.1f} %",
    "accuracy after distillation": lambda each: f"{100 * each.accuracy_after:.1f} %",
}


def _table(found: Sequence["InspectedU"]) -> Table:
    """One column for each U."""
    table = Table("", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for each in found:
        table.add_column(Text(one_line(each.unlabeled)), justify="right", overflow="fold")
    for heading, cell in ROWS.items():
        table.add_row(heading, *map(cell, found))
    return table

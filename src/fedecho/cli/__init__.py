"""The command line: ``fedecho --help`` shows it."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

import typer

from fedecho.cli.comparison import compare
from fedecho.cli.data import data
from fedecho.cli.deploy import certificates, join, serve, submit
from fedecho.cli.look import report, watch
from fedecho.cli.runs import export, list_all, resume, run
from fedecho.cli.schedule import schedule
from fedecho.cli.tables import cost, table
from fedecho.version import __version__

TEACHING = """Asynchronous federated learning with uncertainty-aware distillation.

A first quarter of an hour:

`fedecho run digits --out runs/first` — FedEcho on embedded digits, one client in ten 50 times slower

`fedecho report runs/first --open` — one page: curves, who straggled, what the teachers knew

`fedecho compare digits --algorithms fedbuff,fedecho --seeds 0,1` — methods side by side

`fedecho run digits --set local.client_lr=0.1` — any value can be changed; an unknown key suggests the right one
"""
EPILOG = "Every command has its own --help. `fedecho --install-completion` teaches your shell the names of everything."

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", help=TEACHING, epilog=EPILOG
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedecho {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and stop.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


app.command("list", rich_help_panel="Run")(list_all)
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run": (run, resume, compare, export),
    "Look": (schedule, report, watch),
    "Deploy": (certificates, serve, join, submit),
    "The paper": (table, cost),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(data, name="data", rich_help_panel="The paper")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name can be no text at all
    try:
        app()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # as Typer does with what is printed before the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes again
            raise SystemExit(1) from None

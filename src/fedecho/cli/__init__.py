"""The command line: ``fedecho --help`` shows it."""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from fedecho.cli.data import data
from fedecho.cli.deploy import certificates, join, serve, submit
from fedecho.cli.runs import compare, list_all, resume, run
from fedecho.cli.tables import cost, table
from fedecho.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous federated learning with uncertainty-aware distillation. Start with: fedecho run digits",
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


app.command("list")(list_all)
for command in (run, resume, compare, table, cost, certificates, serve, join, submit):
    app.command()(command)
app.add_typer(data, name="data")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name can be no text at all
    app()

"""The command line: ``fedecho --help`` shows it."""

import typer

from fedecho.cli.data import data
from fedecho.cli.runs import compare, list_all, resume, run
from fedecho.cli.tables import cost, table

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous federated learning with uncertainty-aware distillation. Start with: fedecho run digits",
)
app.command("list")(list_all)
for command in (run, resume, compare, table, cost):
    app.command()(command)
app.add_typer(data, name="data")


def main() -> None:
    app()

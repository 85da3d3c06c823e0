"""All commands in one program, in which every error is one line."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedecho.cli.comparison import compare
from fedecho.cli.console import checked, report_crash, say
from fedecho.cli.data import data
from fedecho.cli.deploy import certificates, join, serve, submit
from fedecho.cli.reports import report, schedule, watch
from fedecho.cli.runs import export, list_all, resume, run
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


class Program(TyperGroup):
    """The commands. A wrong word is one line and exit code 2, a fault of ours one line, exit code 1 and a log file."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except click.ClickException as error:
            _say_wrong_words(error)
            sys.exit(error.exit_code)
        except click.Abort:
            say("aborted")
            sys.exit(1)
        except Exception as error:
            report_crash(error)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def _say_wrong_words(error: click.ClickException) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already; older versions of click do not have it
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    text = " ".join(error.format_message().split()).rstrip(".")
    say(f"{text}; `{context.command_path} --help` shows what there is" if context is not None else text)


app = typer.Typer(
    cls=Program, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", help=TEACHING, epilog=EPILOG
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
        app.command(rich_help_panel=panel)(checked(command))
app.add_typer(data, name="data", rich_help_panel="The paper")


def run_program() -> None:
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

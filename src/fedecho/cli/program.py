"""The command-line program: its overview, lazy loading of commands, and one-line errors."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple

import click
import typer
from click.shell_completion import CompletionItem
from typer.core import TyperGroup

from fedecho.version import __version__

OVERVIEW = """Asynchronous federated learning with uncertainty-aware distillation.

Getting started:

`fedecho run digits --out runs/first` — FedEcho on the bundled digits; one client in ten is 50 times slower

`fedecho report runs/first --open` — an HTML page: accuracy, stragglers, teacher quality

`fedecho compare digits --algorithms fedbuff,fedecho --seeds 0,1` — compare methods in one table

`fedecho run digits --set local.client_lr=0.1` — change any setting; a misspelt key suggests the right one
"""
EPILOG = "Every command has its own --help. `fedecho --install-completion` adds completion to your shell."


class Entry(NamedTuple):
    """A command: ``target`` is its module and function. The summary is the first line of its help."""

    target: str
    summary: str


PANELS: dict[str, dict[str, Entry]] = {
    "Run": {
        "list": Entry("runs:list_all", "List recipes, algorithms, tasks and runtime profiles."),
        "run": Entry("runs:run", "Run one experiment and record it in a folder."),
        "resume": Entry("runs:resume", "Resume an interrupted run; the result is the same as without the interruption."),
        "compare": Entry("comparison:compare", "Run several methods with several seeds and compare them in one table."),
        "export": Entry(
            "runs:export", "Export a run's model in its task's format: for text tasks a transformers folder, with LoRA merged."
        ),
    },
    "Look": {
        "schedule": Entry("reports:schedule", "Predict when each class of clients will report, without training anything."),
        "report": Entry(
            "reports:report",
            "Build one HTML page from any number of runs: curves, clients, staleness, teachers, classes, costs.",
        ),
        "inspect": Entry("inspection:inspect", "Show whether a run's unlabeled data is good enough, beside other candidates."),
        "watch": Entry("reports:watch", "Serve a live report while runs are in progress; stop with Ctrl-C."),
    },
    "Deploy": {
        "certificates": Entry("deploy:certificates", "Create a server certificate and keys for its nodes."),
        "serve": Entry("deploy:serve", "Start a SuperLink with TLS and registered nodes only (the default)."),
        "join": Entry("deploy:join", "Start a SuperNode, which is one client of the federation."),
        "submit": Entry("deploy:submit", "Run an app on a SuperLink, wait for it to finish and return its exit code."),
    },
    "The paper": {
        "table": Entry(
            "tables:table", "Run the missing cells of a table and show our results, next to the paper's if it has such a table."
        ),
        "cost": Entry("tables:cost", "Measure each method's cost to the server: time per version, versions held and memory."),
        "data": Entry("data:data", "Download image datasets or generate an unlabeled one."),
    },
}
COMMANDS = {name: entry for panel in PANELS.values() for name, entry in panel.items()}


def load_command(name: str) -> click.Command:
    """Import a command's module and build the command."""
    from fedecho.cli.console import with_checked_options

    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(import_module(f"fedecho.cli.{module}"), attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    alone.command(name)(with_checked_options(target))
    return typer.main.get_command(alone)


class Program(TyperGroup):
    """The commands, each imported when it is used, so that help and completion are fast.

    A usage error is one line and exit code 2. An unexpected error is one line, exit code 1 and a log file.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.suggest_commands = False  # click itself suggests the nearest name
        self.commands = {name: click.Command(name, help=entry.summary) for name, entry in COMMANDS.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for panel, entries in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), entry.summary) for name, entry in entries.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=entry.summary) for name, entry in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

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
            _say_usage_error(error)
            sys.exit(error.exit_code)
        except click.Abort:
            from fedecho.cli.console import say

            say("aborted")
            sys.exit(1)
        except Exception as error:
            from fedecho.cli.console import report_crash

            report_crash(error)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def _say_usage_error(error: click.ClickException) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already; older click has no such class
        return
    from fedecho.cli.console import say

    context = error.ctx if isinstance(error, click.UsageError) else None
    text = " ".join(error.format_message().split()).rstrip(".")
    say(f"{text}; `{context.command_path} --help` lists the choices" if context is not None else text)


# The overview is plain text: importing rich would triple the time of --help.
app = typer.Typer(
    cls=Program, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=OVERVIEW, epilog=EPILOG
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedecho {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def run_program() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name may not be valid Unicode
    try:
        app()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # Typer handles the same error in earlier output
            # Without this, Python reports an error when it flushes again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None

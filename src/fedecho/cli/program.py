"""All commands in one program, in which every error is one line."""

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

TEACHING = """Asynchronous federated learning with uncertainty-aware distillation.

A first quarter of an hour:

`fedecho run digits --out runs/first` — FedEcho on embedded digits, one client in ten 50 times slower

`fedecho report runs/first --open` — one page: curves, who straggled, what the teachers knew

`fedecho compare digits --algorithms fedbuff,fedecho --seeds 0,1` — methods side by side

`fedecho run digits --set local.client_lr=0.1` — any value can be changed; an unknown key suggests the right one
"""
EPILOG = "Every command has its own --help. `fedecho --install-completion` teaches your shell the names of everything."


class Entry(NamedTuple):
    """A command: ``target`` is its module and function. The summary is the first line of its help."""

    target: str
    summary: str


PANELS: dict[str, dict[str, Entry]] = {
    "Run": {
        "list": Entry("runs:list_all", "Show the recipes, methods, tasks and runtime profiles."),
        "run": Entry("runs:run", "Run one experiment and record it in a folder."),
        "resume": Entry("runs:resume", "Go on with a run that was stopped or killed; the result is what it would have been."),
        "compare": Entry("comparison:compare", "Run several methods with several seeds, and show them in one table."),
        "export": Entry(
            "runs:export",
            "Write a run's model as other programs load it: of text tasks a folder of transformers, LoRA's adapters merged.",
        ),
    },
    "Look": {
        "schedule": Entry(
            "reports:schedule",
            "Say who will report when, before anything is trained: do stragglers report within these versions at all?",
        ),
        "report": Entry(
            "reports:report", "Make one page of any number of runs: curves, clients, staleness, teachers, classes, costs."
        ),
        "watch": Entry("reports:watch", "Show the report's page live while runs go on; Ctrl-C ends it."),
    },
    "Deploy": {
        "certificates": Entry("deploy:certificates", "Make a certificate for a server and keys for its nodes."),
        "serve": Entry("deploy:serve", "Start a SuperLink: TLS and registered nodes only, unless told otherwise."),
        "join": Entry("deploy:join", "Start a SuperNode: one client of the federation."),
        "submit": Entry("deploy:submit", "Run an app on a SuperLink and wait for its end; the exit code is the run's."),
    },
    "The paper": {
        "table": Entry("tables:table", "Run the cells of a paper's table that are missing, and show ours beside the paper's."),
        "cost": Entry(
            "tables:cost",
            "What each method costs the server: seconds of inference and distillation per version, versions and bytes held.",
        ),
        "data": Entry("data:data", "Get image sets, or make an unlabeled one."),
    },
}
COMMANDS = {name: entry for panel in PANELS.values() for name, entry in panel.items()}


def load_command(name: str) -> click.Command:
    """Import a command's module and build the command."""
    from fedecho.cli.console import checked

    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(import_module(f"fedecho.cli.{module}"), attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    alone.command(name)(checked(target))
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
            _say_wrong_words(error)
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


def _say_wrong_words(error: click.ClickException) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already; older versions of click do not have it
        return
    from fedecho.cli.console import say

    context = error.ctx if isinstance(error, click.UsageError) else None
    text = " ".join(error.format_message().split()).rstrip(".")
    say(f"{text}; `{context.command_path} --help` shows what there is" if context is not None else text)


# Importing rich takes twice as long as all else that --help does, so the overview is plain text.
app = typer.Typer(
    cls=Program, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=TEACHING, epilog=EPILOG
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

"""What every command shares: consoles, one-line errors and options."""

import json
import os
import platform
import select
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import click
import typer
from rich.console import Console
from typer.models import OptionInfo

from fedecho.cli.complete import complete_executor, complete_setting, complete_sink, complete_source
from fedecho.core.ranges import SEEDS, VERSIONS, Declared, at_least, declared_by, shown
from fedecho.runs.signals import shortage
from fedecho.runs.suggestions import ConfigError
from fedecho.storage.files import DiskFullError
from fedecho.tasks.data_files import VARIABLE, MissingDataError, at_home
from fedecho.tracking import SINKS

out = Console()
err = Console(stderr=True)

Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|FILE.toml", help="A recipe (see `fedecho list`) or a TOML file.", autocompletion=complete_source
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change any value, e.g. local.client_lr=0.1", autocompletion=complete_setting
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="SINK",
        help=f"Also send numbers to {', '.join(SINKS)}; may be repeated.",
        autocompletion=complete_sink,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but where the result is, and errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else; for scripts.")]
VersionsOption = Annotated[
    int | None, VERSIONS, typer.Option("--versions", "--num-versions", help="How many global versions to make.")
]
JOBS = at_least(1, most=4096)
ExecutorOption = Annotated[
    str, typer.Option("--executor", help="Where clients train: serial, pool, cuda or ray.", autocompletion=complete_executor)
]
WorkersOption = Annotated[
    int | None,
    at_least(1, most=10**5),
    typer.Option("--workers", help="Processes of the pool (2), actors of Ray (one a core), or clients at once on a GPU (6)."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cuda: each worker of pool or ray has a GPU of its own. By default cpu.")
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", metavar="auto|HOST:PORT", help="The Ray cluster to join; by default one is started here."),
]
PrecisionOption = Annotated[str, typer.Option("--precision", help="On a GPU: bf16 or fp32.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="On a GPU: the same bytes every time, slower.")]
OtherSoftware = Annotated[
    bool, typer.Option("--other-software", help="Go on with runs that other software began; their records will say so.")
]
CheckpointEvery = Annotated[
    float,
    at_least(0, most=1e9),
    typer.Option("--checkpoint-every", metavar="SECONDS", help="Real time between checkpoints."),
]


class UserPath(click.Path):
    """A path as it was typed: never empty, ~ in full also where the shell leaves it (``--out=~/runs``)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            self.fail("it is empty: name a place, or . for this folder", param, ctx)
        try:
            return super().convert(str(at_home(Path(value))), param, ctx)
        except MissingDataError as error:
            self.fail(str(error), param, ctx)


PLACE = UserPath()
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", click_type=PLACE, help="Where data and models are; by default FEDECHO_DATA, else ./data."),
]


def use_data_dir(folder: Path | None) -> None:
    """For this process and its workers. Where data lies is no part of an experiment, so no record names it."""
    if folder is not None:
        os.environ[VARIABLE] = str(folder.absolute())


def say(text: str) -> None:
    err.print(one_line(text), soft_wrap=True, markup=False, highlight=False)


def tell(text: str) -> None:
    """A line of the result, in which a name stays what it is."""
    out.print(one_line(text), soft_wrap=True, markup=False)


def one_line(text: str) -> str:
    """What a file or an argument brought along may hold line ends, and orders to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass
class Work:
    """What a command has begun: its run folder, and whether an interrupted command can go on from what it kept."""

    folder: Path | None = None
    is_resumable: bool = False


@contextmanager
def friendly() -> Iterator[Work]:
    """A user's mistake is one line and exit code 2; a full disk is one and 1; a stop on request says how to go on, and 130.

    Whatever else is raised is a fault of ours: one line, exit code 1, and a log file with the traceback.
    """
    work = Work()
    try:
        yield work
    except (click.exceptions.Exit, click.Abort, click.ClickException):
        raise
    except ValueError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        hint = "; finished runs are kept, and `fedecho resume` continues a stopped one from its last checkpoint"
        fail(f"interrupted{hint if work.folder or work.is_resumable else ''}", 130)
    except DiskFullError as error:
        fail(str(error), 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise  # Typer ends without a word
        fail(f"cannot go on: {error}; a run that had begun can be resumed", 2)
    except Exception as error:
        _end(error, work.folder)


def _end(error: Exception, folder: Path | None) -> NoReturn:
    """Exit with one line for an error that is neither invalid input nor the operating system's."""
    from fedecho.executors.worker_pool import WorkerError
    from fedecho.runs.run import Interrupted

    if isinstance(error, Interrupted):
        fail(str(error), 130)
    if isinstance(error, WorkerError):
        # The notes hold the worker's traceback.
        fail(f"{error}; {_logged(error, folder)}" if hasattr(error, "__notes__") else str(error), 1)
    if short := shortage(error):
        fail(short, 2)
    report_crash(error, folder)
    raise typer.Exit(1)


def report_crash(error: Exception, folder: Path | None = None) -> None:
    """One line about an error that nobody foresaw. The log is in the run's ``folder`` if it is there, else a temporary file."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    say(f"unexpected {type(error).__name__}: {text[:300]}; {_logged(error, folder)}; please report it with that file")


def _logged(error: Exception, folder: Path | None) -> str:
    """Where the traceback is. A new file, never what a link leads to, for its owner's eyes alone."""
    text = _log_of(error)
    for place in ([] if folder is None or not folder.is_dir() else [str(folder)]) + [None]:
        with suppress(OSError):
            file, name = tempfile.mkstemp(".log", "fedecho-crash-" if place is None else "crash-", place)
            with os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace") as log:
                log.write(text)
            return f"the traceback is in {name}"
    return "the traceback could not be written to any file"


def _log_of(error: Exception) -> str:
    from fedecho.runs.identity import software

    head = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv), "folder": str(Path.cwd())}
    head |= software() | {"executable": sys.executable, "system": platform.platform()}
    lines = [f"{name}: {value}" for name, value in head.items()]
    return "\n".join([*lines, "", "".join(traceback.format_exception(error))])


def _nobody_reads() -> bool:
    """Does what is printed go nowhere? `| head` has seen enough."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # not a question for this system, or for what stands in for a terminal
        return False


def print_json(told: Any) -> None:
    """Plain text without colors, however wide the terminal."""
    print(json.dumps(told, indent=1))


def fail(text: str, code: int) -> NoReturn:
    say(text)
    raise typer.Exit(code)


def usable(folder: Path) -> None:
    """Is this a place to write to? Said before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder")
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {nearest}: choose another folder")


def checked(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with options in the ranges that they declare."""
    ranges: dict[str, tuple[str, Declared]] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        options = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionInfo)]
        if options and (declared := declared_by(hint)) is not None:
            words = [str(word) for word in (options[0].default, *(options[0].param_decls or ()))]
            given = [word for word in words if word.startswith("--")]
            ranges[name] = (given[0] if given else f"--{name.replace('_', '-')}", declared)

    @wraps(command)
    def within_ranges(**arguments: Any) -> None:
        with friendly():
            for name, (option, declared) in ranges.items():
                if fault := declared.fault(arguments[name]):
                    fail(f"{option} {fault}", 2)
        command(**arguments)

    return within_ranges


def execution_options(
    executor: str,
    workers: int | None,
    precision: str,
    deterministic: bool,
    device: str | None = None,
    address: str | None = None,
    other_software: bool = False,
) -> dict[str, Any]:
    """Checked before any work is done."""
    from fedecho.runs.execution import Execution

    told: Any = {"executor": executor, "workers": workers, "precision": precision, "deterministic": deterministic}
    told |= {"device": device, "address": address, "other_software": other_software}
    Execution(**told)
    return dict(told)


def names(text: str) -> list[str]:
    """Methods, separated by commas, each once."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ConfigError("--algorithms names no method")
    return list(dict.fromkeys(found))


def numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers separated by commas, got {shown(text)}") from None
    for number in found:
        if fault := SEEDS.fault(number):
            raise ConfigError(f"{option}: each {fault}")
    return found

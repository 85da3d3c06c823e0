"""Shared by all commands: consoles, one-line errors and options."""

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

from fedecho.cli.complete import complete_algorithm, complete_executor, complete_setting, complete_sink, complete_source
from fedecho.core.ranges import SEEDS, VERSIONS, Declared, at_least, declared_by, format_value
from fedecho.runs.signals import memory_shortage
from fedecho.runs.suggestions import ConfigError
from fedecho.storage.files import DiskFullError
from fedecho.tasks.data_files import VARIABLE, MissingDataError, expand_home
from fedecho.tracking import SINKS

DEFAULT = Path("runs")
"""The parent folder of runs without ``--out``."""
out = Console()
err = Console(stderr=True)

Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|FILE.toml", help="A recipe (see `fedecho list`) or a TOML file.", autocompletion=complete_source
    ),
]
AlgorithmOption = Annotated[
    str | None, typer.Option(help="Use this method instead of the recipe's.", autocompletion=complete_algorithm)
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change any setting, e.g. local.client_lr=0.1", autocompletion=complete_setting
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="SINK", help=f"Also log metrics to {', '.join(SINKS)}; repeatable.", autocompletion=complete_sink
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the location of the result, and errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
VersionsOption = Annotated[
    int | None, VERSIONS, typer.Option("--versions", "--num-versions", help="Number of global versions to produce.")
]
JOBS = at_least(1, most=4096)
ExecutorOption = Annotated[
    str, typer.Option("--executor", help="Where clients train: serial, pool, cuda or ray.", autocompletion=complete_executor)
]
WorkersOption = Annotated[
    int | None,
    at_least(1, most=10**5),
    typer.Option("--workers", help="Pool processes (default 2), Ray actors (one per core) or concurrent clients on a GPU (6)."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu (default), or cuda to give each pool or ray worker its own GPU.")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", metavar="auto|HOST:PORT", help="The Ray cluster to join. Default: start a local one.")
]
PrecisionOption = Annotated[str, typer.Option("--precision", help="Precision on a GPU: bf16 or fp32.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Make repeated GPU runs bit-identical; slower.")]
OtherSoftware = Annotated[
    bool,
    typer.Option(
        "--other-software", help="Resume runs that were started with other software versions; their records will note it."
    ),
]
CheckpointEvery = Annotated[
    float,
    at_least(0, most=1e9),
    typer.Option("--checkpoint-every", metavar="SECONDS", help="Wall-clock time between checkpoints."),
]


class UserPath(click.Path):
    """A non-empty path, with ~ expanded also where the shell does not (``--out=~/runs``)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            self.fail("the path is empty: give one, or . for the current folder", param, ctx)
        try:
            return super().convert(str(expand_home(Path(value))), param, ctx)
        except MissingDataError as error:
            self.fail(str(error), param, ctx)


USER_PATH = UserPath()
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", click_type=USER_PATH, help="Folder of datasets and models. Default: FEDECHO_DATA, else ./data."),
]


def use_data_dir(folder: Path | None) -> None:
    """Set the data folder of this process and its workers. It is not part of the experiment, so records do not contain it."""
    if folder is not None:
        os.environ[VARIABLE] = str(folder.absolute())


def say(text: str) -> None:
    err.print(one_line(text), soft_wrap=True, markup=False, highlight=False)


def print_line(text: str) -> None:
    """Print a line of the result, without interpreting markup in it."""
    out.print(one_line(text), soft_wrap=True, markup=False)


def one_line(text: str) -> str:
    """Escape line breaks and terminal control sequences, which files and arguments may contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass
class Work:
    """What a command has begun: its run folder, and whether an interrupted command can go on from what it kept."""

    folder: Path | None = None
    is_resumable: bool = False


@contextmanager
def one_line_errors() -> Iterator[Work]:
    """Turn exceptions into one line and an exit code: invalid input 2, a full disk 1, an interruption 130.

    Any other exception is a bug: one line, exit code 1 and a log file with the traceback.
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
        if isinstance(error, BrokenPipeError) and _is_pipe_closed():
            raise  # Typer exits silently
        fail(f"cannot continue: {error}; a run that had started can be resumed", 2)
    except Exception as error:
        _exit_for(error, work.folder)


def _exit_for(error: Exception, folder: Path | None) -> NoReturn:
    """Exit with one line for an error that is neither invalid input nor the operating system's."""
    from fedecho.executors.worker_pool import WorkerError
    from fedecho.runs.run import Interrupted

    if isinstance(error, Interrupted):
        fail(str(error), 130)
    if isinstance(error, WorkerError):
        # The notes hold the worker's traceback.
        fail(f"{error}; {_logged(error, folder)}" if hasattr(error, "__notes__") else str(error), 1)
    if short := memory_shortage(error):
        fail(short, 2)
    report_crash(error, folder)
    raise typer.Exit(1)


def report_crash(error: Exception, folder: Path | None = None) -> None:
    """Print one line about an unexpected error. The log is in the run's ``folder`` if that exists, else in a temporary file."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    say(f"unexpected {type(error).__name__}: {text[:300]}; {_logged(error, folder)}; please report it and attach that file")


def _logged(error: Exception, folder: Path | None) -> str:
    """Write the traceback to a new file that only its owner can read, and say where it is."""
    text = _log_of(error)
    for place in ([] if folder is None or not folder.is_dir() else [str(folder)]) + [None]:
        with suppress(OSError):
            file, name = tempfile.mkstemp(".log", "fedecho-crash-" if place is None else "crash-", place)
            with os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace") as log:
                log.write(text)
            return f"the traceback is in {name}"
    return "the traceback could not be written to any file"


def _log_of(error: Exception) -> str:
    from fedecho.runs.software import software

    head = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv), "folder": str(Path.cwd())}
    head |= software() | {"executable": sys.executable, "system": platform.platform()}
    lines = [f"{name}: {value}" for name, value in head.items()]
    return "\n".join([*lines, "", "".join(traceback.format_exception(error))])


def _is_pipe_closed() -> bool:
    """Whether stdout is a pipe that its reader has closed, as `| head` does."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll on this system, or stdout has no file descriptor
        return False


def print_json(value: Any) -> None:
    """Print JSON without colors or wrapping."""
    print(json.dumps(value, indent=1))


def fail(text: str, code: int) -> NoReturn:
    say(text)
    raise typer.Exit(code)


def check_writable(folder: Path) -> None:
    """Check that a folder is writable, before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder")
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {nearest}: choose another folder")


def with_checked_options(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command to check its options against the ranges they declare."""
    ranges: dict[str, tuple[str, Declared]] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        options = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionInfo)]
        if options and (declared := declared_by(hint)) is not None:
            words = [str(word) for word in (options[0].default, *(options[0].param_decls or ()))]
            given = [word for word in words if word.startswith("--")]
            ranges[name] = (given[0] if given else f"--{name.replace('_', '-')}", declared)

    @wraps(command)
    def within_ranges(**arguments: Any) -> None:
        with one_line_errors():
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
    """The arguments of ``Execution``, checked before any work is done."""
    from fedecho.runs.execution import Execution

    options: Any = {"executor": executor, "workers": workers, "precision": precision, "deterministic": deterministic}
    options |= {"device": device, "address": address, "other_software": other_software}
    Execution(**options)
    return dict(options)


def split_methods(text: str) -> list[str]:
    """Split comma-separated methods and drop duplicates."""
    methods = [name.strip() for name in text.split(",") if name.strip()]
    if not methods:
        raise ConfigError("--algorithms is empty: give at least one method")
    return list(dict.fromkeys(methods))


def split_seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--seeds must be comma-separated whole numbers, got {format_value(text)}") from None
    for seed in seeds:
        if fault := SEEDS.fault(seed):
            raise ConfigError(f"--seeds: each {fault}")
    return seeds

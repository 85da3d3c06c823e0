"""What every command shares: the two consoles, errors in one line, options."""

import json
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fedecho.cli.complete import complete_executor, complete_setting, complete_sink, complete_source
from fedecho.core.checkpoint import CheckpointError
from fedecho.core.disk import DiskFullError
from fedecho.data.locate import VARIABLE
from fedecho.experiments.config import ConfigError
from fedecho.experiments.execution import Execution
from fedecho.experiments.run import Interrupted
from fedecho.experiments.shortage import shortage
from fedecho.simulation.executors.crew import WorkerError
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
Versions = Annotated[int | None, typer.Option("--versions", "--num-versions", help="How many global versions to make.")]
ExecutorOption = Annotated[
    str, typer.Option("--executor", help="Where clients train: serial, pool, cuda or ray.", autocompletion=complete_executor)
]
WorkersOption = Annotated[
    int | None,
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
CheckpointEvery = Annotated[float, typer.Option("--checkpoint-every", metavar="SECONDS", help="Real time between checkpoints.")]

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data and models are; by default FEDECHO_DATA, else ./data.")
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


@contextmanager
def friendly() -> Iterator[None]:
    """A user's mistake is one line and exit code 2; a full disk is one and 1; a stop on request says how to go on, and 130."""
    try:
        yield
    except (ConfigError, CheckpointError, ValueError) as error:
        fail(str(error), 2)
    except Interrupted as stopped:
        fail(str(stopped), 130)
    except KeyboardInterrupt:
        fail(
            "interrupted; what is finished is kept; `fedecho resume` goes on from a run's last checkpoint, or anew",
            130,
        )
    except WorkerError as error:
        say(str(error))
        for note in getattr(error, "__notes__", ()):
            err.print(note, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not (short := shortage(error)):
            raise
        fail(short, 2)
    except DiskFullError as error:
        fail(str(error), 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise  # Typer ends without a word
        fail(f"cannot go on: {error}; a run that had begun can be resumed", 2)


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
    told: Any = {"executor": executor, "workers": workers, "precision": precision, "deterministic": deterministic}
    told |= {"device": device, "address": address, "other_software": other_software}
    Execution(**told)
    return dict(told)


def check_jobs(jobs: int) -> int:
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    return jobs


def names(text: str) -> list[str]:
    """Methods, separated by commas, each once."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ConfigError("--algorithms names no method")
    return list(dict.fromkeys(found))


def numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers separated by commas, got {text!r}") from None

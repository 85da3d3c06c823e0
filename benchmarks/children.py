"""Run the command line in a forked child that is interrupted at a given time or system call."""

import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedecho.cli import app
from fedecho.runs import run
from fedecho.runs.record import RECORD
from fedecho.storage import files

SETTINGS = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20", "concurrency=5", "eval_every=2"]
RUN = ["run", "digits", "--algorithm", "fedecho", "--versions", "6", *(word for s in SETTINGS for word in ("--set", s))]
EVERY_MOMENT = ["--checkpoint-every", "0"]

Happening = Callable[[str, tuple[Any, ...]], None]
"""Told the name of a call and its arguments right before it is made."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (below 0: the signal), all it said, and how long it took."""

    code: int
    said: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def num_calls(self) -> int:
        return self._last("calls")

    @property
    def last_saved(self) -> int | None:
        """The number of the last checkpoint that was written whole."""
        return self._last("saved") if "\nsaved " in f"\n{self.said}" else None

    def _last(self, word: str) -> int:
        return [int(line.split()[1]) for line in self.said.splitlines() if line.startswith(f"{word} ")][-1]


def words_for(folder: Path) -> list[str]:
    """What a user types: to begin, or to go on if there is a run."""
    begun = (folder / RECORD).exists()
    return (["resume", str(folder)] if begun else [*RUN, "--out", str(folder)]) + EVERY_MOMENT


def child(
    folder: Path, *, kill_after_s: float | None = None, happens_at: int = -1, happening: Happening = lambda name, what: None
) -> Ended:
    """Begin the run in ``folder`` or go on with it. The parent has imported everything, so a child costs milliseconds."""
    began = time.perf_counter()
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ours)
        _be_the_child(words_for(folder), theirs, happens_at, happening)
    os.close(theirs)
    if kill_after_s is not None:
        time.sleep(max(0.0, began + kill_after_s - time.perf_counter()))
        os.kill(pid, signal.SIGKILL)  # one that has ended is still there until it is waited for
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return Ended(os.waitstatus_to_exitcode(status), said, time.perf_counter() - began)


def _be_the_child(words: list[str], pipe: int, happens_at: int, happening: Happening) -> None:
    """Never returns. A pipe takes what is said, because a full disk would swallow it."""
    code = 99
    try:
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        torch.set_num_threads(1)
        calls = _intercept(happens_at, happening)
        app(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
        os.write(2, f"calls {next(calls) - 1}\n".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _intercept(happens_at: int, happening: Happening) -> "itertools.count[int]":
    """Count every call that changes the folder; right before call ``happens_at``, let it happen."""
    calls = itertools.count(1)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == happens_at:
                happening(name, arguments)
            return real(*arguments, **options)

        return call

    def reported(*arguments: Any) -> Path:
        path = save(*arguments)
        os.write(2, f"saved {arguments[1]}\n".encode())
        return path

    save, run.save_checkpoint = run.save_checkpoint, reported
    files._write_all = watched("write", files._write_all)
    os.fsync = watched("sync", os.fsync)
    Path.replace = watched("rename", Path.replace)  # type: ignore[method-assign]
    Path.unlink = watched("remove", Path.unlink)  # type: ignore[method-assign]
    return calls

"""The folder of a run: one process at a time, and nothing half-written left behind."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from errno import EAGAIN, ENOLCK, ENOSYS, ENOTSUP
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import count
from pathlib import Path
from typing import Any

from fedecho.core.checkpoint import remove_checkpoints
from fedecho.core.disk import disk_full_at, make_private, open_own
from fedecho.experiments.config import ConfigError
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.identity import check_same, is_finished
from fedecho.experiments.record import RECORD, read_header
from fedecho.experiments.schema import Header

LOCK = ".lock"
MODEL = "model.safetensors"
PARTS = ("checkpoint-*.safetensors.part", f"{MODEL}.part", "run.jsonl.part", "summary.json.part")
NO_LOCKS = {ENOLCK, ENOSYS, ENOTSUP}


class FolderInUse(ConfigError):  # noqa: N818 (its name says it)
    """Another process runs what is in this folder."""


def check_folder(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Is this the folder to begin, or to go on, with this experiment? Nothing is written before it is known."""
    if resume and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume")
    if resume:
        check_same(folder, experiment)
    elif is_finished(folder):
        raise ConfigError(f"{folder} already holds a run, which is finished: choose another folder")
    elif (folder / RECORD).exists():
        resumable(folder)
        raise ConfigError(f"{folder} already holds a run: `fedecho resume {folder}` goes on with it")
    elif (folder / MODEL).exists():
        raise ConfigError(f"{folder / MODEL} is not of a run, which would write its own over it: choose another folder")


def is_deployed(header: Mapping[str, Any]) -> bool:
    """Did its clients train on nodes of a network?"""
    return bool(header["execution"].get("executor") == "flower")


def resumable(folder: Path) -> Header:
    """The header of a run that can go on in this process. A deployed one goes on from its app, where its nodes are."""
    header = read_header(folder)
    if is_deployed(header) and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume; submit its app with another run folder")
    if is_deployed(header):
        raise ConfigError(
            f"{folder} holds a run over a network: submit its app again with the same run folder (fedecho submit) and it goes on"
        )
    return header


@contextmanager
def owned(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Make the folder, its owner's alone, and keep others out of it. The kernel gives the lock back however this process ends."""
    was_there = folder.exists()
    with disk_full_at(folder):
        make_private(folder)
        lock = _locked(folder / LOCK, say)
    try:
        remove_parts(folder)
        yield
    finally:
        # While it is still held, so that the name is never that of a lock somebody else has taken.
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)
        if not was_there:
            with suppress(OSError):
                folder.rmdir()  # only if nothing came of it


@contextmanager
def own_folder(base: Path) -> Iterator[Path]:
    """The first of NAME, NAME-2, NAME-3, ... that is not there, made now: of two processes that look at once each gets its own."""
    was_there = base.parent.exists()
    base.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered(base):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    try:
        yield folder
    finally:
        with suppress(OSError):  # they are removed only if nothing came of it
            folder.rmdir()
            if not was_there:
                base.parent.rmdir()


@contextmanager
def unused_folder(base: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """The first of NAME, NAME-2, NAME-3, ... that no other process uses, which is then ours until the end."""
    with ExitStack() as stack:
        for folder in numbered(base):
            with suppress(FolderInUse):
                stack.enter_context(owned(folder, say))
                break
        yield folder


def numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def is_tidy(folder: Path) -> bool:
    """A process that was killed right after its summary had no time to remove its checkpoints and its lock."""
    return not any(next(folder.glob(pattern), None) for pattern in ("checkpoint-*", LOCK))


def tidy_finished(folder: Path, say: Callable[[str], None]) -> None:
    """Remove what such a process left."""
    if not is_tidy(folder):
        with owned(folder, say):
            remove_checkpoints(folder)


def remove_parts(folder: Path) -> None:
    """What a killed process had begun to write."""
    for pattern in PARTS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _locked(path: Path, say: Callable[[str], None]) -> int:
    """An open file that holds the lock of this name. A file that lost its name while we waited for it is not the lock."""
    while True:
        file = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                say(f"{path.parent} is on a file system without locks: see to it that no other process uses it")
                return file
            owner = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno != EAGAIN:
                raise
            who = f"another process ({owner})" if owner.isdecimal() else "another process"
            raise FolderInUse(f"{path.parent} is in use by {who}: wait for it or stop it, or choose another folder") from None
        if _has_name(file, path):
            with suppress(OSError):  # for a person to read; a disk may be too full even for that
                os.truncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            return file
        os.close(file)


def _has_name(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False

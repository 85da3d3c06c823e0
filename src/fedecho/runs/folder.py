"""The run folder: its lock, the checks before a run is started or resumed there, and leftovers of killed processes."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from errno import EAGAIN, ENOLCK, ENOSYS, ENOTSUP
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import count
from pathlib import Path
from typing import Any

from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import Experiment
from fedecho.runs.identity import check_same
from fedecho.runs.record import RECORD, read_header
from fedecho.runs.record_schema import Header
from fedecho.runs.summary import SUMMARY, is_finished
from fedecho.storage.checkpoint import remove_checkpoints
from fedecho.storage.files import disk_full_at, make_private, open_own

LOCK = ".lock"
MODEL = "model.safetensors"
PARTS = ("checkpoint-*.safetensors.part", f"{MODEL}.part", "run.jsonl.part", "summary.json.part")
NO_LOCKS = {ENOLCK, ENOSYS, ENOTSUP}


class FolderInUse(ConfigError):  # noqa: N818 (reads better without a suffix)
    """Another process uses this run folder."""


def check_folder(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Check that this experiment may be started, or resumed, in this folder. Nothing is written."""
    for name in (SUMMARY, MODEL):
        if (folder / name).exists() and not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is not a regular file, so the run could not end: remove it")
    if resume and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume")
    if resume:
        check_same(folder, experiment)
    elif is_finished(folder):
        raise ConfigError(f"{folder} already holds a finished run: choose another folder")
    elif (folder / RECORD).exists():
        resumable(folder)
        raise ConfigError(f"{folder} already holds a run: continue it with `fedecho resume {folder}`")
    elif (folder / MODEL).exists():
        raise ConfigError(f"{folder / MODEL} does not belong to a run and would be overwritten: choose another folder")


def is_deployed(header: Mapping[str, Any]) -> bool:
    """Is this the header of a deployed run, whose clients trained on the nodes of a network?"""
    return bool(header["execution"].get("executor") == "flower")


def resumable(folder: Path) -> Header:
    """Read the header of a run that can be resumed in this process. A deployed run must be resumed by its app instead."""
    header = read_header(folder)
    if is_deployed(header) and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume; submit its app with another run folder")
    if is_deployed(header):
        raise ConfigError(
            f"{folder} holds a deployed run: submit its app again with the same run folder to resume it (fedecho submit)"
        )
    return header


@contextmanager
def locked_folder(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Create the folder (readable by its owner only) and lock it. The kernel releases the lock however this process ends."""
    existed = folder.exists()
    with disk_full_at(folder):
        make_private(folder)
    try:
        with locked_file(folder / LOCK, folder, say):
            remove_parts(folder)
            yield
    finally:
        if not existed:
            with suppress(OSError):
                folder.rmdir()  # succeeds only if the folder is empty


@contextmanager
def locked_file(path: Path, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock this file, which stands for the use of ``folder``, and remove it in the end."""
    with disk_full_at(path.parent):
        lock = _locked(path, folder, say)
    try:
        yield
    finally:
        # Unlinked while the lock is still held: otherwise the file might already be another process's lock.
        path.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def new_folder(base: Path) -> Iterator[Path]:
    """Create the first of NAME, NAME-2, NAME-3, ... that does not exist. Concurrent processes get different folders."""
    parent_existed = base.parent.exists()
    base.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered(base):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    try:
        yield folder
    finally:
        with suppress(OSError):  # empty folders are removed, others are kept
            folder.rmdir()
            if not parent_existed:
                base.parent.rmdir()


@contextmanager
def unused_folder(base: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Lock the first of NAME, NAME-2, NAME-3, ... that no other process uses."""
    with ExitStack() as stack:
        for folder in numbered(base):
            with suppress(FolderInUse):
                stack.enter_context(locked_folder(folder, say))
                break
        yield folder


def numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def is_tidy(folder: Path) -> bool:
    """Are there no leftover checkpoints or lock? A process killed right after writing its summary leaves them behind."""
    return not any(next(folder.glob(pattern), None) for pattern in ("checkpoint-*", LOCK))


def tidy_finished(folder: Path, say: Callable[[str], None]) -> None:
    """Remove leftovers of a killed process from a finished run's folder."""
    if not is_tidy(folder):
        with locked_folder(folder, say):
            remove_checkpoints(folder)


def remove_parts(folder: Path) -> None:
    """Remove partially written files of a killed process."""
    for pattern in PARTS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _locked(path: Path, folder: Path, say: Callable[[str], None]) -> int:
    """Open and lock the file. If its name was unlinked in the meantime, the lock is worthless: try again."""
    while True:
        file = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                say(f"{folder} is on a file system without locks: make sure that no other process uses it")
                return file
            owner = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno != EAGAIN:
                raise
            who = f"another process ({owner})" if owner.isdecimal() else "another process"
            raise FolderInUse(f"{folder} is in use by {who}: wait for it or stop it, or choose another folder") from None
        if _has_name(file, path):
            with suppress(OSError):  # informative only; the disk may be full
                os.truncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            return file
        os.close(file)


def _has_name(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False

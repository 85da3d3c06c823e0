"""Run files on disk: written atomically, never through a link, readable by their owner alone; digests of inputs."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ELOOP, ENOSPC
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedecho.storage.user_files import opened

FULL = {ENOSPC, EDQUOT, EFBIG}
"""No space, a quota used up, and a file above the limit of its file system or of the process."""


class DiskFullError(OSError):
    """No more can be written. What was written before is whole; ``advice`` says how to go on."""

    advice = "free some space and try again"

    def __str__(self) -> str:
        return f"the disk is full: cannot write {self.filename} ({self.strerror}); {self.advice}"


@contextmanager
def disk_full_at(path: Path) -> Iterator[None]:
    """A write that finds no space says where: the error of a buffered file does not know its own name."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(error.errno, error.strerror, str(path)) from None


def make_private(folder: Path) -> None:
    """A folder that only its owner may enter. One that is there already stays as its owner made it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_own(path: Path | str, flags: int) -> int:
    """Open a file of ours for writing, never what a link of its name leads to. A new one allows nobody what its folder denies."""
    mode = 0o666 & Path(path).parent.stat().st_mode
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != ELOOP:
            raise
        raise ValueError(f"{path} is a link, and what it leads to is not written: remove the link") from None


def file_sha256(path: Path) -> str:
    """Once for each state of a file: weights are gigabytes."""
    return _digest(path, path.stat().st_mtime_ns)


@cache
def _digest(path: Path, changed_ns: int) -> str:
    with opened(path) as file:
        return file_digest(file, "sha256").hexdigest()


def arrays_sha256(arrays: Iterable[NDArray[Any] | None]) -> str:
    whole = sha256()
    for array in arrays:
        if array is not None:
            whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


@cache
def source_sha256() -> str:
    """Of this package's own source files, with their names: a version number does not tell of an edit."""
    package, whole = Path(__file__).parents[1], sha256()
    for path in sorted(package.rglob("*.py")):
        with path.open("rb") as file:
            whole.update(f"{path.relative_to(package).as_posix()} {file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()

"""Safe writing of run files (no symbolic links, private folders, clear errors on a full disk), and digests of input files."""

import io
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

from fedecho.storage.user_files import open_regular

FULL = {ENOSPC, EDQUOT, EFBIG}
"""No space left, quota exceeded, and file larger than the file system or the process allows."""


class DiskFullError(OSError):
    """The disk is full. Files written before are intact; ``advice`` says how to continue."""

    advice = "free some space and try again"

    def __str__(self) -> str:
        return f"the disk is full: cannot write {self.filename} ({self.strerror}); {self.advice}"


@contextmanager
def disk_full_at(path: Path) -> Iterator[None]:
    """Turn an out-of-space error into a ``DiskFullError`` with the path, which the error of a buffered file lacks."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(error.errno, error.strerror, str(path)) from None


def make_private(folder: Path) -> None:
    """Create a folder that only its owner may enter. An existing folder keeps its permissions."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_own(path: Path | str, flags: int) -> int:
    """Open a file for writing without following links. A new file grants no permission that its folder denies."""
    mode = 0o666 & Path(path).parent.stat().st_mode
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != ELOOP:
            raise
        raise ValueError(f"{path} is a symbolic link, and links are not followed when writing: remove it") from None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, cached until the file changes: model weights may have gigabytes."""
    return _digest(path, path.stat().st_mtime_ns)


@cache
def _digest(path: Path, changed_ns: int) -> str:
    with open_regular(path) as file:
        return file_digest(file, "sha256").hexdigest()


def arrays_sha256(arrays: Iterable[NDArray[Any] | None]) -> str:
    """Return the SHA-256 of the arrays' data, skipping None."""
    digest = sha256()
    for array in arrays:
        if array is not None:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@cache
def source_sha256() -> str:
    """Return the SHA-256 of this package's source files and their names, which changes with every edit."""
    package, digest = Path(__file__).parents[1], sha256()
    for path in sorted(package.rglob("*.py")):
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(package).as_posix()} {file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file completely or not at all, even across a power cut. A failed write leaves an existing file unchanged."""
    pieces = [data] if isinstance(data, bytes) else data
    temporary = path.with_name(path.name + ".part")
    with disk_full_at(path):
        try:
            temporary.unlink(missing_ok=True)  # left by another process, or a link planted there
            # Unbuffered, so that closing the file writes nothing and cannot fail.
            with open(temporary, "xb", buffering=0, opener=open_own) as file:
                for piece in pieces:
                    _write_all(file, piece)
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """Write all of ``data``. A nearly full disk accepts a part and only fails at the next write."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]

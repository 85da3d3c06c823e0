"""Files that a user names: they may be pipes, devices without an end, damaged, or larger than any memory."""

import os
from io import BufferedReader
from pathlib import Path
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISREG, S_ISSOCK

MIB = 1 << 20
GIB = 1 << 30
KINDS = {S_ISFIFO: "a named pipe", S_ISSOCK: "a socket", S_ISCHR: "a device", S_ISBLK: "a device", S_ISDIR: "a folder"}
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""A pipe that takes the file's place between the look at it and its opening does not block."""


class FileError(ValueError):
    """A file that cannot be read, and why."""

    def __init__(self, path: Path, reason: str, *, missing: bool = False) -> None:
        super().__init__(f"cannot read {path}: {reason}")
        self.reason, self.missing = reason, missing


def check_file(path: Path, most_bytes: int | None = None) -> Path:
    """The path itself, if it is a regular file of at most so many bytes: for libraries that open files by name."""
    try:
        _check(path, path.stat(), most_bytes)
    except FileNotFoundError as error:
        raise FileError(path, str(error.strerror), missing=True) from None
    except (OSError, ValueError) as error:
        raise _of(path, error) from None
    return path


def opened(path: Path, most_bytes: int | None = None) -> BufferedReader:
    """A regular file, open for reading. Nothing else is opened: a pipe would wait for ever, a device may never end."""
    check_file(path, most_bytes)
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | WITHOUT_WAITING), "rb")
    except OSError as error:
        raise _of(path, error) from None
    try:
        _check(path, os.fstat(file.fileno()), most_bytes)
    except FileError:
        file.close()
        raise
    return file


def read_bytes(path: Path, most_bytes: int = GIB) -> bytes:
    """The whole of a regular file. What the system makes up (/proc) has no size before it is read."""
    try:
        with opened(path, most_bytes) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise _of(path, error) from None
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def _check(path: Path, found: os.stat_result, most_bytes: int | None) -> None:
    if not S_ISREG(found.st_mode):
        kind = next((name for is_kind, name in KINDS.items() if is_kind(found.st_mode)), "something else")
        raise FileError(path, f"it is {kind}, and a regular file is needed: give its path, or copy the content into one")
    if most_bytes is not None and found.st_size > most_bytes:
        raise _too_large(path, most_bytes)


def _too_large(path: Path, most_bytes: int) -> FileError:
    return FileError(path, f"it has more than {most_bytes} bytes, the limit for such a file: is it the right one?")


def _of(path: Path, error: OSError | ValueError) -> FileError:
    if isinstance(error, FileError):
        return error
    return FileError(path, getattr(error, "strerror", None) or str(error))

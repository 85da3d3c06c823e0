"""Guarded reading of files that a user names: regular files only, with size limits, and TOML with a depth limit."""

import os
import re
import tomllib
from io import BufferedReader
from pathlib import Path
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISREG, S_ISSOCK
from typing import Any

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


MAX_BYTES = 1 << 20
MAX_DEPTH = 20
"""Tables in tables: ours have four."""
PLAIN = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|\#[^\n]*''', re.DOTALL
)
"""A string or a comment: neither is a key of several parts."""
DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")
"""The parser takes a table for each part, and for each key a copy of all its parts: 60 kB cost it 14 seconds and 4 GB."""
LARGEST = 2**63
"""Of whole numbers, by TOML's own words."""


class TomlError(ValueError):
    """What is wrong with it, in one line."""


def read_toml(path: Path, hint: str = "") -> dict[str, Any]:
    """``hint`` says what to do where there is no such file."""
    try:
        content = read_bytes(path, MAX_BYTES)
    except FileError as error:
        told = f"there is no file {path}{hint}" if error.missing else str(error)
        raise TomlError(told) from None
    try:
        return parsed(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TomlError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise TomlError(f"{path}: {error}") from None


def parsed(text: str) -> dict[str, Any]:
    """The table of a text; a ValueError says what is wrong with it."""
    if DOTTED.search(PLAIN.sub(" x ", text)):
        raise TomlError(f"a key has more than {MAX_DEPTH} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise TomlError(f"there are more than {MAX_DEPTH} tables in each other") from None
    _check_toml(table)
    return table


def _check_toml(table: dict[str, Any]) -> None:
    """No deeper and no larger than anything behind this can take; without recursion, because that is what could overflow."""
    level: list[tuple[str, Any]] = [("", table)]
    for _ in range(MAX_DEPTH):
        level = [child for name, value in level for child in _children(name, value)]
        for name, value in level:
            if isinstance(value, int) and not -LARGEST <= value < LARGEST:
                raise TomlError(f"{name[:80]}: a whole number must have at most 64 bits")
        level = [(name, value) for name, value in level if isinstance(value, dict | list)]
    if level:
        raise TomlError(f"there are more than {MAX_DEPTH} tables in each other")


def _children(name: str, value: dict[str, Any] | list[Any]) -> list[tuple[str, Any]]:
    """What a list holds has the list's name."""
    if isinstance(value, list):
        return [(name, child) for child in value]
    return [(f"{name}.{key}" if name else key, child) for key, child in value.items()]

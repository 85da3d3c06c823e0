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
"""Flags so that opening does not block on a pipe that replaced the file after it was checked."""


class FileError(ValueError):
    """A file cannot be read. ``reason`` says why; ``missing`` is True if it does not exist."""

    def __init__(self, path: Path, reason: str, *, missing: bool = False) -> None:
        super().__init__(f"cannot read {path}: {reason}")
        self.reason, self.missing = reason, missing


def check_file(path: Path, most_bytes: int | None = None) -> Path:
    """Return the path if it is a regular file of at most ``most_bytes``, for libraries that open files by name."""
    try:
        _check(path, path.stat(), most_bytes)
    except FileNotFoundError as error:
        raise FileError(path, str(error.strerror), missing=True) from None
    except (OSError, ValueError) as error:
        raise _file_error(path, error) from None
    return path


def open_regular(path: Path, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading. Anything else is rejected: a pipe would block, a device may be endless."""
    check_file(path, most_bytes)
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | WITHOUT_WAITING), "rb")
    except OSError as error:
        raise _file_error(path, error) from None
    try:
        _check(path, os.fstat(file.fileno()), most_bytes)
    except FileError:
        file.close()
        raise
    return file


def read_bytes(path: Path, most_bytes: int = GIB) -> bytes:
    """Read a whole regular file. The limit is checked while reading too, as files in /proc report no size."""
    try:
        with open_regular(path, most_bytes) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise _file_error(path, error) from None
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def _check(path: Path, stat: os.stat_result, most_bytes: int | None) -> None:
    if not S_ISREG(stat.st_mode):
        kind = next((name for is_kind, name in KINDS.items() if is_kind(stat.st_mode)), "something else")
        raise FileError(path, f"it is {kind}, not a regular file: copy its content into a file and pass that file's path")
    if most_bytes is not None and stat.st_size > most_bytes:
        raise _too_large(path, most_bytes)


def _too_large(path: Path, most_bytes: int) -> FileError:
    return FileError(
        path, f"it has more than {most_bytes} bytes, the limit for this kind of file: check that it is the right one"
    )


def _file_error(path: Path, error: OSError | ValueError) -> FileError:
    if isinstance(error, FileError):
        return error
    return FileError(path, getattr(error, "strerror", None) or str(error))


MAX_DEPTH = 20
"""The deepest nesting of TOML tables. The package's own files use four levels."""
PLAIN = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|\#[^\n]*''', re.DOTALL
)
"""Matches strings and comments, in which dots do not make a dotted key."""
DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")
"""Matches keys with too many parts. The parser's cost is quadratic in them: a key of 60 kB takes 14 seconds and 4 GB."""
LARGEST = 2**63
"""TOML's integers are signed 64-bit."""


class TomlError(ValueError):
    """A TOML file is missing, unreadable or invalid. The message is one line."""


def read_toml(path: Path, hint: str = "") -> dict[str, Any]:
    """Read a TOML file. ``hint`` is appended to the error message if the file does not exist."""
    try:
        content = read_bytes(path, MIB)
    except FileError as error:
        raise TomlError(f"there is no file {path}{hint}" if error.missing else str(error)) from None
    try:
        return parse_toml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TomlError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise TomlError(f"{path}: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML text. Raise a ValueError if it is invalid or nested too deeply."""
    if DOTTED.search(PLAIN.sub(" x ", text)):
        raise TomlError(f"a key has more than {MAX_DEPTH} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise TomlError(f"tables are nested more than {MAX_DEPTH} levels deep") from None
    _check_toml(table)
    return table


def _check_toml(table: dict[str, Any]) -> None:
    """Limit the nesting and the size of integers. Iterative, as recursion could overflow the stack."""
    level: list[tuple[str, Any]] = [("", table)]
    for _ in range(MAX_DEPTH):
        level = [child for name, value in level for child in _children(name, value)]
        for name, value in level:
            if isinstance(value, int) and not -LARGEST <= value < LARGEST:
                raise TomlError(f"{name[:80]}: an integer must fit into 64 bits")
        level = [(name, value) for name, value in level if isinstance(value, dict | list)]
    if level:
        raise TomlError(f"tables are nested more than {MAX_DEPTH} levels deep")


def _children(name: str, value: dict[str, Any] | list[Any]) -> list[tuple[str, Any]]:
    """Return the named children of a table or a list. Items of a list get the list's name."""
    if isinstance(value, list):
        return [(name, child) for child in value]
    return [(f"{name}.{key}" if name else key, child) for key, child in value.items()]

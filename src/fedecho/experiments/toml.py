"""TOML of a user's, read with limits: it may be damaged, of another program, or made to break a reader."""

import re
import tomllib
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedecho.core.user_files import FileError, read_bytes
from fedecho.data.unlabeled import NAMED
from fedecho.tasks import mathinstruct, mrpc

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
OWN_FILES = ("unlabeled", "train", "dev", "test", "model")
"""A task's settings that may be a user's own files or folders."""
KNOWN = {*NAMED, *mrpc.FILES, *mathinstruct.FILES}
"""The names of sets."""


class TomlError(ValueError):
    """What is wrong with it, in one line."""


def read_toml(path: Path) -> dict[str, Any]:
    try:
        content = read_bytes(path, MAX_BYTES)
    except FileError as error:
        told = f"there is no file {path}; `fedecho list` shows the recipes" if error.missing else str(error)
        raise TomlError(told) from None
    try:
        return parsed(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TomlError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise TomlError(f"{path}: {error}") from None


def shown(value: Any) -> str:
    """What a user wrote, as far as it fits into a line."""
    return shorten(repr(value), 80, placeholder=" ...") if len(repr(value)) > 80 else repr(value)


def setting_of(text: str) -> dict[str, Any]:
    """``local.client_lr=0.1`` as a table; a value that is no TOML is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TomlError(f"--set wants key=value, got {shown(text)}")
    if len(text.splitlines()) > 1:
        raise TomlError(
            f"--set wants one key=value in one line, got {shown(text)}: repeat --set for each, write \\n in a string"
        )
    parts = key.strip().split(".")
    if len(parts) > MAX_DEPTH:
        raise TomlError(f"--set wants a key of at most {MAX_DEPTH} parts, got one of {len(parts)}")
    try:
        table: Any = parsed(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        table = value.strip()
    for part in reversed(parts):
        table = {part.strip(): table}
    return dict(table)


def beside(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """A trace that a file names lies beside the file, unless its path says otherwise; so do a task's own files that are there."""
    runtimes, task = tree.get("runtimes"), tree.get("task")
    if isinstance(runtimes, dict) and isinstance(runtimes.get("trace"), str):
        tree["runtimes"] = runtimes | {"trace": str(path.parent / runtimes["trace"])}
    if isinstance(task, dict):
        tree["task"] = {key: _found_beside(path, value) if key in OWN_FILES else value for key, value in task.items()}
    return tree


def _found_beside(path: Path, value: Any) -> Any:
    """The name of a known set, or a path that is right as it stands, is left alone."""
    if not isinstance(value, str) or not value or value in KNOWN or _is_there(Path(value)):
        return value
    return str(path.parent / value) if _is_there(path.parent / value) else value


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a text that is no path at all
        return False


def parsed(text: str) -> dict[str, Any]:
    """The table of a text; a ValueError says what is wrong with it."""
    if DOTTED.search(PLAIN.sub(" x ", text)):
        raise TomlError(f"a key has more than {MAX_DEPTH} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise TomlError(f"there are more than {MAX_DEPTH} tables in each other") from None
    _check(table)
    return table


def _check(table: dict[str, Any]) -> None:
    """No deeper and no larger than anything behind this can take; without recursion, because that is what could overflow."""
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(value, int) and not -LARGEST <= value < LARGEST for value in level):
            raise TomlError("a whole number must have at most 64 bits")
        level = [value for value in level if isinstance(value, dict | list)]
    if level:
        raise TomlError(f"there are more than {MAX_DEPTH} tables in each other")

"""TOML of a user's, read with limits: it may be damaged, of another program, or made to break a reader. Free of torch."""

import re
import tomllib
from pathlib import Path
from typing import Any

from fedecho.core.user_files import FileError, read_bytes

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
    _check(table)
    return table


def _check(table: dict[str, Any]) -> None:
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

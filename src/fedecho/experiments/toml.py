"""TOML of a user's, read with limits: it may be damaged, of another program, or made to break a reader."""

import tomllib
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
"""Tables in tables: ours have four."""
LARGEST = 2**63
"""Of whole numbers, by TOML's own words."""


class TomlError(ValueError):
    """What is wrong with it, in one line."""


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise TomlError(f"there is no file {path}; `fedecho list` shows the recipes") from None
    except OSError as error:
        raise TomlError(f"cannot read {path}: {error}") from None
    if len(content) > MAX_BYTES:
        raise TomlError(f"cannot read {path}: it has more than {MAX_BYTES} bytes, and no experiment needs as many")
    try:
        return parsed(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TomlError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise TomlError(f"{path}: {error}") from None


def parsed(text: str) -> dict[str, Any]:
    """The table of a text; a ValueError says what is wrong with it."""
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

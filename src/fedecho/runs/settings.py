"""Parses single settings from the command line, and resolves the paths in a TOML file relative to it."""

from pathlib import Path
from textwrap import shorten
from tomllib import TOMLDecodeError
from typing import Any

from fedecho.storage.user_files import MAX_DEPTH, TomlError, parse_toml
from fedecho.tasks.data_files import IMAGE_SETS, MATH_FILES, MRPC_FILES

OWN_FILES = ("unlabeled", "train", "dev", "test", "model")
"""A task's settings that may be paths to the user's own files."""
VALUE = "value"
DATASETS = {*IMAGE_SETS, *MRPC_FILES, *MATH_FILES}
"""The names of the built-in data sets."""


def shown(value: Any) -> str:
    """A user's input, shortened to fit in one line."""
    return shorten(repr(value), 80, placeholder=" ...") if len(repr(value)) > 80 else repr(value)


def setting_of(text: str) -> dict[str, Any]:
    """Parse a setting like ``local.client_lr=0.1`` into a table. A value that is not TOML is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TomlError(f"--set needs key=value, got {shown(text)}")
    if len(text.splitlines()) > 1:
        raise TomlError(
            f"--set needs one key=value on one line, got {shown(text)}: repeat --set for several, write \\n in a string"
        )
    parts = key.strip().split(".")
    if len(parts) > MAX_DEPTH:
        raise TomlError(f"--set needs a key of at most {MAX_DEPTH} parts, got one of {len(parts)}")
    try:
        table: Any = parse_toml(f"{VALUE} = {value.strip()}")[VALUE]
    except TOMLDecodeError:
        table = value.strip()
    except TomlError as error:
        raise TomlError(f"--set {shown(key.strip())}: {str(error).removeprefix(f'{VALUE}: ')}") from None
    for part in reversed(parts):
        table = {part.strip(): table}
    return dict(table)


def resolve_paths(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Resolve the paths in a TOML file's table relative to the file: the trace, and a task's own files if they exist."""
    runtimes, task = tree.get("runtimes"), tree.get("task")
    if isinstance(runtimes, dict) and isinstance(runtimes.get("trace"), str):
        tree["runtimes"] = runtimes | {"trace": str(path.parent / runtimes["trace"])}
    if isinstance(task, dict):
        tree["task"] = {key: _resolved(path, value) if key in OWN_FILES else value for key, value in task.items()}
    return tree


def _resolved(path: Path, value: Any) -> Any:
    """Resolve a path relative to the file. Data set names, and paths that exist from here, are unchanged."""
    if not isinstance(value, str) or not value or value in DATASETS or _exists(Path(value)):
        return value
    return str(path.parent / value) if _exists(path.parent / value) else value


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # not a valid path
        return False

"""What an experiment's TOML may hold beside values: files beside it, and single settings from the command line."""

from pathlib import Path
from textwrap import shorten
from tomllib import TOMLDecodeError
from typing import Any

from fedecho.storage.user_files import MAX_DEPTH, TomlError, parsed
from fedecho.tasks.text import mathinstruct, mrpc
from fedecho.tasks.vision.unlabeled import NAMED

OWN_FILES = ("unlabeled", "train", "dev", "test", "model")
"""A task's settings that may be a user's own files or folders."""
VALUE = "value"
KNOWN = {*NAMED, *mrpc.FILES, *mathinstruct.FILES}
"""The names of sets."""


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
        table: Any = parsed(f"{VALUE} = {value.strip()}")[VALUE]
    except TOMLDecodeError:
        table = value.strip()
    except TomlError as error:
        raise TomlError(f"--set {shown(key.strip())}: {str(error).removeprefix(f'{VALUE}: ')}") from None
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

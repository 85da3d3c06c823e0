"""Text files line by line, with errors that name the file and the line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedecho.core.user_files import FileError, read_bytes


class BadLine(ValueError):  # noqa: N818 (a line, said in one line)
    """Something in a file that cannot be read, where it stands and what was expected."""

    def __init__(self, path: Path, number: int, problem: str) -> None:
        super().__init__(f"{path}, line {number}: {problem}")


def read_text(path: Path) -> str:
    """UTF-8, with or without a byte-order mark."""
    try:
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileError as error:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"there is no file {path}{where}" if error.missing else str(error)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BadLine(path, line, f"no UTF-8 text ({error.reason}): save the file as UTF-8") from None


def jsonl(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number and object; every key of ``wanted`` is there."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        yield number, with_keys(json_of(line, path, number), wanted, path, number)


def json_of(text: str, path: Path, number: int = 1) -> Any:
    """What a text that begins at this line of a file says."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLine(path, number + error.lineno - 1, f"no JSON ({error.msg})") from None
    except RecursionError:
        raise BadLine(path, number, "no JSON of ours (nested too deeply)") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadLine(path, number, f"no JSON of ours ({error})") from None


def with_keys(found: Any, wanted: Sequence[str], path: Path, number: int) -> dict[str, Any]:
    if not isinstance(found, dict):
        keys = f" with {', '.join(wanted)}" if wanted else ""
        raise BadLine(path, number, f"must be a JSON object{keys}, in braces, got {json.dumps(found)[:40]}")
    for key in wanted:
        if key not in found:
            raise BadLine(path, number, f"has no {key!r}; it has {', '.join(map(repr, found)) or 'nothing'}")
    return found


def tsv(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Each line's number and cells by the names in the heading. No quoting: a quotation mark is a character like any other."""
    heading, *lines = read_text(path).split("\n")
    names = heading.rstrip("\r").split("\t")
    for name in names:
        if names.count(name) > 1:
            raise BadLine(path, 1, f"the heading names {name!r} twice")
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(names):
            raise BadLine(path, number, f"has {len(cells)} columns where the heading has {len(names)} ({', '.join(names)})")
        yield number, dict(zip(names, cells, strict=True))


def text_of(value: Any, key: str, path: Path, number: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadLine(path, number, f"{key!r} must be a text that is not empty, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        broken = value[error.start].encode("ascii", "backslashreplace").decode()
        raise BadLine(path, number, f"{key!r} holds half of a character ({broken}): mend or remove the line") from None
    return value

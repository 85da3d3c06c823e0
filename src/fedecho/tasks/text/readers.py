"""Readers of text data: sentence pairs, and questions with worked answers. Errors name the file and the line."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedecho.core.randomness import numpy_rng
from fedecho.storage.user_files import FileError, read_bytes


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


GLUE = {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"}
"""The columns of the GLUE files beside the names that users have."""
MOST_DIGITS = 9


@dataclass(frozen=True)
class Pair:
    """Two sentences, a class (None in an unlabeled set) and where they stand."""

    first: str
    second: str
    label: int | None
    path: Path
    line: int


def read_pairs(path: Path, *, labelled: bool) -> list[Pair]:
    """All pairs of a file; of an unlabeled one the labels, if there are any, are not looked at."""
    pairs = [_pair(row, number, path, labelled) for number, row in _rows(path)]
    if not pairs:
        raise ValueError(f"{path} holds no pairs")
    return pairs


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        yield from jsonl(path, ("sentence1", "sentence2"))
        return
    if path.suffix != ".tsv":
        raise ValueError(f"{path} must be a .tsv or a .jsonl file")
    for number, row in tsv(path):
        yield number, row | {name: row[theirs] for name, theirs in GLUE.items() if theirs in row and name not in row}


def _pair(row: dict[str, Any], number: int, path: Path, labelled: bool) -> Pair:
    for name in ("sentence1", "sentence2", *(("label",) if labelled else ())):
        if name not in row:
            columns = ", ".join((*GLUE, *GLUE.values()))
            if path.suffix == ".tsv":
                raise BadLine(path, 1, f"the heading has no {name}; the names known are {columns}")
            raise BadLine(path, number, f"there is no {name}; the names known are {columns}")
    first, second = (text_of(row[name], name, path, number) for name in ("sentence1", "sentence2"))
    return Pair(first, second, _label(row["label"], path, number) if labelled else None, path, number)


def _label(value: Any, path: Path, number: int) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or len(text) > MOST_DIGITS:
        raise BadLine(path, number, f"the label must be a class from 0 on, got {shorten(repr(value), 80, placeholder=' ...')}")
    return int(text)


KEYS = (("question", "answer"), ("instruction", "output"), ("prompt", "response"))
"""The names that GSM8K, MathInstruct and many others give the two parts."""
INPUT = "input"
"""What some instructions are about, as Alpaca has it; often empty."""
CALCULATOR = re.compile(r"<<[-+*/().,%$\d ]+=[-+$\d.,/% ]+>>")
"""GSM8K's notes such as <<48/2=24>>; shifts and templates of program code are none."""
MOST_STEPS = 8


@dataclass(frozen=True)
class Worked:
    """A question, its answer, the group it is partitioned by, and where it stands."""

    question: str
    answer: str
    group: str
    path: Path
    line: int


def read_instructions(path: Path) -> list[Worked]:
    """All questions of a .json (one list) or .jsonl (one object a line) file."""
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{path} must be a .json or a .jsonl file")
    found = [_worked(row, number, path) for number, row in (_array(path) if path.suffix == ".json" else jsonl(path, ()))]
    if not found:
        raise ValueError(f"{path} holds no questions")
    return found


def held_out(every: list[Worked], num: int, seed: int, name: str, clients: int) -> tuple[list[Worked], list[Worked]]:
    """(``num`` questions drawn, all rows that ask others, for the clients). MathInstruct asks some questions more than once."""
    drawn: dict[str, Worked] = {}
    for row in numpy_rng(seed, "unlabeled").permutation(len(every)):
        drawn.setdefault(every[row].question, every[row])
    if num >= len(drawn):
        raise ValueError(f"task.num_unlabeled is {num}, but {name} has {len(drawn)} questions in all")
    held = dict(islice(drawn.items(), num))
    kept = [each for each in every if each.question not in held]
    if len(kept) < clients:
        told = f"task.num_unlabeled = {num} leaves {len(kept)} of {name} to {clients} clients"
        raise ValueError(f"{told}: lower it, or task.num_clients")
    return list(held.values()), kept


def _array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The items of a JSON list, numbered as a file with an item a line would be."""
    items = json_of(read_text(path), path)
    if not isinstance(items, list):
        raise ValueError(f"{path} must be a JSON list of objects, got a {type(items).__name__}")
    for number, item in enumerate(items, start=1):
        yield number, with_keys(item, (), path, number)


def _worked(row: dict[str, Any], number: int, path: Path) -> Worked:
    for ask, reply in KEYS:
        if ask in row and reply in row:
            question, answer = text_of(row[ask], ask, path, number), text_of(row[reply], reply, path, number)
            if row.get(INPUT) not in (None, ""):
                question = f"{question}\n\n{text_of(row[INPUT], INPUT, path, number)}"
            plain = text_of(CALCULATOR.sub("", answer), f"{reply} without <<...>>", path, number)
            return Worked(question, plain, str(row.get("source", _steps(plain))), path, number)
    pairs = " or ".join(" and ".join(pair) for pair in KEYS)
    raise BadLine(path, number, f"must have {pairs}; it has {', '.join(map(repr, row)) or 'nothing'}")


def _steps(answer: str) -> str:
    """Without a source, the length of the solution makes the groups: GSM8K's questions take two to eight steps."""
    steps = [line for line in answer.splitlines() if line.strip() and not line.startswith("####")]
    return f"{min(len(steps), MOST_STEPS)} steps"

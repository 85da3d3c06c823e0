"""Readers of text data: sentence pairs, and questions with answers. Errors name the file and the line."""

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


class LineError(ValueError):
    """A line of a data file that cannot be read: where it is and what was expected."""

    def __init__(self, path: Path, number: int, problem: str) -> None:
        super().__init__(f"{path}, line {number}: {problem}")


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with or without a byte-order mark."""
    try:
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileError as error:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"there is no file {path}{where}" if error.missing else str(error)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise LineError(path, line, f"not UTF-8 ({error.reason}): save the file as UTF-8") from None


def jsonl(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line; raise if an object lacks a key of ``wanted``."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        yield number, with_keys(json_of(line, path, number), wanted, path, number)


def json_of(text: str, path: Path, number: int = 1) -> Any:
    """Parse JSON text that starts at the given line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LineError(path, number + error.lineno - 1, f"invalid JSON ({error.msg})") from None
    except RecursionError:
        raise LineError(path, number, "unsupported JSON (nested too deeply)") from None
    except ValueError as error:  # a number with thousands of digits
        raise LineError(path, number, f"unsupported JSON ({error})") from None


def with_keys(value: Any, wanted: Sequence[str], path: Path, number: int) -> dict[str, Any]:
    """Return ``value`` if it is an object with all keys of ``wanted``; raise otherwise."""
    if not isinstance(value, dict):
        keys = f" with {', '.join(wanted)}" if wanted else ""
        raise LineError(path, number, f"must be a JSON object{keys}, got {json.dumps(value)[:40]}")
    for key in wanted:
        if key not in value:
            raise LineError(path, number, f"has no {key!r}; it has {', '.join(map(repr, value)) or 'nothing'}")
    return value


def tsv(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, cells by column name). There is no quoting: a quotation mark is an ordinary character."""
    header, *lines = read_text(path).split("\n")
    names = header.rstrip("\r").split("\t")
    for name in names:
        if names.count(name) > 1:
            raise LineError(path, 1, f"the header names {name!r} twice")
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(names):
            raise LineError(path, number, f"has {len(cells)} columns where the header has {len(names)} ({', '.join(names)})")
        yield number, dict(zip(names, cells, strict=True))


def text_of(value: Any, key: str, path: Path, number: int) -> str:
    """Return ``value`` if it is a non-empty string that can be encoded; raise otherwise."""
    if not isinstance(value, str) or not value.strip():
        raise LineError(path, number, f"{key!r} must be a non-empty string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        broken = value[error.start].encode("ascii", "backslashreplace").decode()
        raise LineError(path, number, f"{key!r} contains half of a surrogate pair ({broken}): fix or remove the line") from None
    return value


GLUE = {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"}
"""Our column names and those of the GLUE files."""
MOST_DIGITS = 9


@dataclass(frozen=True)
class SentencePair:
    """Two sentences, their class (None in an unlabeled set) and their location."""

    first: str
    second: str
    label: int | None
    path: Path
    line: int


def read_pairs(path: Path, *, labelled: bool) -> list[SentencePair]:
    """Read all pairs of a file; with ``labelled=False`` any labels are ignored."""
    pairs = [_pair(row, number, path, labelled) for number, row in _rows(path)]
    if not pairs:
        raise ValueError(f"{path} contains no pairs")
    return pairs


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        yield from jsonl(path, ("sentence1", "sentence2"))
        return
    if path.suffix != ".tsv":
        raise ValueError(f"{path} must be a .tsv or a .jsonl file")
    for number, row in tsv(path):
        yield number, row | {name: row[theirs] for name, theirs in GLUE.items() if theirs in row and name not in row}


def _pair(row: dict[str, Any], number: int, path: Path, labelled: bool) -> SentencePair:
    for name in ("sentence1", "sentence2", *(("label",) if labelled else ())):
        if name not in row:
            columns = ", ".join((*GLUE, *GLUE.values()))
            if path.suffix == ".tsv":
                raise LineError(path, 1, f"the header has no {name}; accepted names are {columns}")
            raise LineError(path, number, f"there is no {name}; accepted names are {columns}")
    first, second = (text_of(row[name], name, path, number) for name in ("sentence1", "sentence2"))
    return SentencePair(first, second, _label(row["label"], path, number) if labelled else None, path, number)


def _label(value: Any, path: Path, number: int) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or len(text) > MOST_DIGITS:
        raise LineError(
            path, number, f"the label must be a class number from 0, got {shorten(repr(value), 80, placeholder=' ...')}"
        )
    return int(text)


KEYS = (("question", "answer"), ("instruction", "output"), ("prompt", "response"))
"""Key names for question and answer in GSM8K, MathInstruct and many other datasets."""
INPUT = "input"
"""Additional input of an instruction, as in Alpaca; often empty."""
CALCULATOR = re.compile(r"<<[-+*/().,%$\d ]+=[-+$\d.,/% ]+>>")
"""GSM8K's calculator notes such as <<48/2=24>>; bit shifts and templates in program code do not match."""
MOST_STEPS = 8


@dataclass(frozen=True)
class WorkedExample:
    """A question, its reference answer, the group used for partitioning, and the location."""

    question: str
    answer: str
    group: str
    path: Path
    line: int


def read_instructions(path: Path) -> list[WorkedExample]:
    """Read all questions of a .json (one list) or .jsonl (one object per line) file."""
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{path} must be a .json or a .jsonl file")
    examples = [
        _worked_example(row, number, path) for number, row in (_array(path) if path.suffix == ".json" else jsonl(path, ()))
    ]
    if not examples:
        raise ValueError(f"{path} contains no questions")
    return examples


def split_unlabeled(
    examples: list[WorkedExample], num: int, seed: int, name: str, clients: int
) -> tuple[list[WorkedExample], list[WorkedExample]]:
    """Draw ``num`` questions as U; return them and the examples of all other questions (MathInstruct repeats some questions)."""
    drawn: dict[str, WorkedExample] = {}
    for row in numpy_rng(seed, "unlabeled").permutation(len(examples)):
        drawn.setdefault(examples[row].question, examples[row])
    if num >= len(drawn):
        raise ValueError(f"task.num_unlabeled is {num}, but {name} has only {len(drawn)} questions")
    held = dict(islice(drawn.items(), num))
    labelled = [example for example in examples if example.question not in held]
    if len(labelled) < clients:
        problem = f"task.num_unlabeled = {num} leaves {len(labelled)} examples of {name} for {clients} clients"
        raise ValueError(f"{problem}: lower it or task.num_clients")
    return list(held.values()), labelled


def _array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the items of a JSON list, numbered as if there were one per line."""
    items = json_of(read_text(path), path)
    if not isinstance(items, list):
        raise ValueError(f"{path} must be a JSON list of objects, got a {type(items).__name__}")
    for number, item in enumerate(items, start=1):
        yield number, with_keys(item, (), path, number)


def _worked_example(row: dict[str, Any], number: int, path: Path) -> WorkedExample:
    for question_key, answer_key in KEYS:
        if question_key in row and answer_key in row:
            question = text_of(row[question_key], question_key, path, number)
            answer = text_of(row[answer_key], answer_key, path, number)
            if row.get(INPUT) not in (None, ""):
                question = f"{question}\n\n{text_of(row[INPUT], INPUT, path, number)}"
            plain = text_of(CALCULATOR.sub("", answer), f"{answer_key} without <<...>>", path, number)
            return WorkedExample(question, plain, str(row.get("source", _steps(plain))), path, number)
    pairs = " or ".join(" and ".join(pair) for pair in KEYS)
    raise LineError(path, number, f"must have {pairs}; it has {', '.join(map(repr, row)) or 'nothing'}")


def _steps(answer: str) -> str:
    """Group examples without a source by the length of their solution: GSM8K's questions take two to eight steps."""
    steps = [line for line in answer.splitlines() if line.strip() and not line.startswith("####")]
    return f"{min(len(steps), MOST_STEPS)} steps"

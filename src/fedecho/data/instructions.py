"""Questions with worked answers: MathInstruct's JSON, GSM8K's jsonl, or a user's own jsonl of instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fedecho.core.rng import numpy_rng
from fedecho.data.lines import BadLine, json_of, jsonl, read_text, text_of, with_keys

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

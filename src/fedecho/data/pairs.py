"""Pairs of sentences: GLUE's MRPC files, or a user's own .tsv or .jsonl with sentence1, sentence2 and label."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedecho.data.lines import BadLine, jsonl, text_of, tsv

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

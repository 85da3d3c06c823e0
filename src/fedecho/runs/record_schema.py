"""The schema of the files that are read back: a record's header and lines, and the summary."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST_INT, LARGEST = 2**63 - 1, sys.float_info.max
"""Limits of numbers: they are stored in 64-bit arrays."""
MODEL_FILES = "model files"
"""The note in a header that holds the digest of a pretrained model's files."""
MOST_CLIENTS = 10**8
"""Reports allocate an array entry for each client."""


class SchemaError(Exception):
    """A field that does not fit the schema: its path, what was expected, and its value (none if it is missing)."""

    def __init__(self, path: str, expected: str, *value: object) -> None:
        super().__init__(path, expected, *value)
        self.path, self.expected, self.value = path, expected, value

    def under(self, name: str) -> "SchemaError":
        return SchemaError(f"{name}.{self.path}" if self.path else name, self.expected, *self.value)

    def __str__(self) -> str:
        if not self.value:
            return f"{self.path} is missing"
        shown = repr(self.value[0])
        return f"{self.path or 'it'} must be {self.expected}, got {shown if len(shown) <= 60 else shown[:57] + '...'}"


Check = Callable[[Any], None]
"""Raises ``SchemaError``."""


@dataclass(frozen=True)
class PlainType:
    """The type of a plain value: a description for messages, the Python types, and an optional test."""

    description: str
    types: tuple[type, ...]
    test: Callable[[Any], bool] | None = None

    def check(self, value: object) -> None:
        if type(value) not in self.types or not (self.test is None or self.test(value)):
            raise SchemaError("", self.description, value)


NUMBERS = (int, float)
Whole = Annotated[int, PlainType("a whole number", (int,), lambda value: -LARGEST_INT <= value <= LARGEST_INT)]
Count = Annotated[int, PlainType("a whole number of at least 0", (int,), lambda value: 0 <= value <= LARGEST_INT)]
MOST_DEPTH = 100
Client = Annotated[
    int, PlainType("a whole number of at least 0 and below 100,000,000", (int,), lambda value: 0 <= value < MOST_CLIENTS)
]
Every = Annotated[int, PlainType("a whole number of at least 1", (int,), lambda value: 1 <= value <= LARGEST_INT)]
Seconds = Annotated[float, PlainType("a finite number of at least 0", NUMBERS, lambda value: 0 <= value <= LARGEST)]
Finite = Annotated[float, PlainType("a finite number", NUMBERS, lambda value: -LARGEST <= value <= LARGEST)]
Label = Annotated[
    str,
    PlainType("a whole number below 100,000 as text", (str,), lambda text: text.isascii() and text.isdigit() and len(text) < 6),
]
PLAIN: dict[Any, PlainType] = {
    int: PlainType("a whole number", (int,)),
    float: PlainType("a number", NUMBERS, lambda value: type(value) is float or -LARGEST <= value <= LARGEST),
    str: PlainType("a text", (str,)),
    bool: PlainType("true or false", (bool,)),
    NoneType: PlainType("null", (NoneType,)),
}


class Clients(TypedDict, total=False):
    """A header's clients, or totals if there are very many. Empty for a deployed run."""

    examples: list[Count]
    classes: list[str]
    labels: list[dict[Label, Count]]
    num_clients: Annotated[
        int, PlainType("a whole number of at least 0, at most 100,000,000", (int,), lambda value: 0 <= value <= MOST_CLIENTS)
    ]
    num_examples: Count
    examples_at: dict[str, Count]
    class_counts: dict[str, Any] | None


class Header(TypedDict):
    """The first line of a record: the run's identity, configuration and environment."""

    event: Literal["header"]
    config: dict[str, Any] | None
    name: str
    seed: int
    num_versions: Count
    execution: dict[str, Any]
    software: NotRequired[dict[str, Any]]
    algorithm: NotRequired[str]
    parts: NotRequired[dict[str, Any] | None]
    attributes: NotRequired[dict[str, Any] | None]
    clients: NotRequired[Clients | None]
    inputs: NotRequired[dict[str, str] | None]
    notes: NotRequired[dict[str, Any] | None]
    trace_sha256: NotRequired[str | None]
    record_every: NotRequired[Every]
    clock: NotRequired[Literal["virtual", "real"]]
    command: NotRequired[str]
    started: NotRequired[str]
    num_params: NotRequired[Count]
    num_unlabeled: NotRequired[Count]


class DispatchLine(TypedDict):
    time: Seconds
    client: Client
    dispatch: Count
    base: Count


class MessageLine(TypedDict):
    """A client's message that belongs to no job. Its client may not exist."""

    time: Seconds
    client: Whole
    status: str
    reason: NotRequired[str]
    code: NotRequired[str]


_WithClass = TypedDict("_WithClass", {"class": NotRequired[str]})  # "class" is a keyword


class AnswerLine(DispatchLine, _WithClass):
    """The answer to a job. The norm of its update and the client's own metrics are further fields."""

    status: str
    reason: NotRequired[str]
    code: NotRequired[str]
    staleness: Count


class VersionLine(TypedDict):
    """A new version. The method's own metrics are further fields."""

    version: Count
    time: Seconds
    teacher_coverage: NotRequired[list[Count]]


class AdviceLine(TypedDict):
    """What the run advised its user to change."""

    version: Count
    time: Seconds
    text: str


class EvaluationLine(TypedDict):
    """An evaluation. The task's own scores are further fields of any type."""

    version: Count
    time: Seconds
    accuracy: NotRequired[float]
    per_class: NotRequired[list[float]]
    real_s: NotRequired[Seconds]
    clients_s: NotRequired[Seconds]
    server_s: NotRequired[Seconds]
    versions_alive: NotRequired[Count]
    peak_bytes: NotRequired[Count]


class SpentBy(TypedDict):
    reports: Count
    clients: Count
    epsilon: float


class Spent(TypedDict):
    """A summary's privacy: epsilon per client, or the number of clients per epsilon if there are very many."""

    delta: float
    largest_epsilon: float
    epsilon: NotRequired[dict[str, float]]
    epsilon_by_reports: NotRequired[list[SpentBy]]


class CellSummary(TypedDict):
    """Summary in a result file. A diverged run has ``num_versions`` alone."""

    num_versions: Count
    last10_accuracy: NotRequired[float]
    final_accuracy: NotRequired[float]
    best_accuracy: NotRequired[float]
    real_s: NotRequired[Seconds]
    scores: NotRequired[dict[str, float]]


class CellFile(TypedDict):
    """Result file of one table cell."""

    cell: str
    summary: CellSummary
    evaluations: list[EvaluationLine]
    config: dict[str, Any]
    execution: dict[str, Any]
    software: dict[str, Any]
    unlabeled: str
    commit: str
    notes: NotRequired[dict[str, str]]
    diverged: NotRequired[str]


NUMERIC_EXTRAS: tuple[Any, ...] = (AnswerLine, VersionLine)
"""Lines whose further fields must be numbers."""


def is_number(value: object) -> bool:
    """Is this a number that a float can hold?"""
    return type(value) is float or (type(value) is int and -LARGEST <= value <= LARGEST)


def check_line(line: Mapping[str, Any]) -> None:
    """Check a line of a record. Unknown events are accepted: a later version may have added them."""
    event = line.get("event")
    if type(event) is not str:
        raise SchemaError("event", "a text", *([line["event"]] if "event" in line else ()))
    if event == "arrival":
        _check(AnswerLine if "dispatch" in line else MessageLine)(line)
    elif event in LINES:
        _check(LINES[event])(line)
    if event in ("header", "evaluation"):
        _check_depth(line)
    if event == "header":
        _check_sizes(line.get("clients") or {})
        for part in ("config", "parts", "attributes"):
            if type(name := (line.get(part) or {}).get("name", "")) is not str:
                raise SchemaError(f"{part}.name", "a text", name)


def _check_depth(line: Mapping[str, Any]) -> None:
    """Limit the depth of fields of any type, which are processed by recursion."""
    for name, value in line.items():
        level = [value]
        for _ in range(MOST_DEPTH):
            level = [
                each for one in level for each in (one.values() if type(one) is dict else one if type(one) is list else ())
            ]
        if level:
            raise SchemaError(name, f"nested at most {MOST_DEPTH} deep", value)


def _check_sizes(clients: Mapping[str, Any]) -> None:
    sizes = {name: len(clients[name]) for name in ("examples", "classes", "labels") if name in clients}
    for name, size in sizes.items():
        if size != (most := max(sizes.values())):
            raise SchemaError(f"clients.{name}", f"a list of as many clients as the others ({most})", f"{size} entries")


def check_fields(cls: Any, tree: Any) -> dict[str, Any]:
    """Check a table against the fields of a dataclass and return these fields. Others are dropped."""
    _check(cls)(tree)
    return {f.name: tree[f.name] for f in fields(cls) if f.name in tree}


def check_cell(tree: Any) -> dict[str, Any]:
    """Check a result file. Unknown fields are an error."""
    _check(CellFile)(tree)
    for part in ("config", "execution", "software"):
        _check_depth(tree[part])
    if others := tree.keys() - CellFile.__annotations__.keys():
        raise SchemaError(min(others), "left out", tree[min(others)])
    return dict(tree)


def loaded(text: bytes) -> Any:
    """Parse JSON. All errors are ``ValueError`` with a short message."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


LINES: dict[str, Any] = {
    "header": Header,
    "dispatch": DispatchLine,
    "version": VersionLine,
    "evaluation": EvaluationLine,
    "advice": AdviceLine,
}


@cache
def _check(hint: Any) -> Check:
    """Build the check of a type."""
    if hint is Any:
        return lambda value: None
    if hint in PLAIN:
        return PLAIN[hint].check
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next(each.check for each in inner if isinstance(each, PlainType))
    if origin is Literal:
        return PlainType(" or ".join(map(repr, inner)), (str,), lambda value: value in inner).check
    if origin in (UnionType, Union):
        (other,) = (_check(option) for option in inner if option is not NoneType)
        return lambda value: None if value is None else other(value)
    if origin is list:
        return _each(_check(inner[0]))
    if origin is dict:
        return _entries(_check(inner[0]), _check(inner[1]))
    return _table(hint)


def _each(item: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not list:
            raise SchemaError("", "a list", value)
        for index, each in enumerate(value):
            _check_at(str(index), item, each)

    return check


def _entries(key: Check, item: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not dict:
            raise SchemaError("", "a table", value)
        for name, each in value.items():
            _check_at(name, key, name)
            _check_at(name, item, each)

    return check


def _table(cls: Any) -> Check:
    """Build the check of a TypedDict or a dataclass, including its required fields and the type of further fields."""
    hints = {"event": str, **get_type_hints(cls, include_extras=True)}
    required = _required(cls)
    rules = {name: _rule(get_args(hint)[0] if get_origin(hint) is NotRequired else hint) for name, hint in hints.items()}
    extra = _rule(Finite if cls in NUMERIC_EXTRAS else Any)

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise SchemaError("", "a table", value)
        for name, each in value.items():
            types, test, exact = rules.get(name, extra)
            if type(each) not in types or not (test is None or test(each)):
                _check_at(name, exact, each)
        if not required <= value.keys():
            raise SchemaError(next(name for name in rules if name in required and name not in value), "")

    return check


def _check_at(name: str, check: Check, value: Any) -> None:
    try:
        check(value)
    except SchemaError as error:
        raise error.under(name) from None


def _rule(hint: Any) -> tuple[tuple[type, ...], Callable[[Any], bool] | None, Check]:
    """A field's types and test, for a fast check of plain values in records of millions of lines, and its full check."""
    plain = PLAIN.get(hint) or next((each for each in get_args(hint) if isinstance(each, PlainType)), None)
    return ((), None, _check(hint)) if plain is None else (plain.types, plain.test, plain.check)


def _required(cls: Any) -> frozenset[str]:
    if is_typeddict(cls):
        return frozenset(cls.__required_keys__)
    return frozenset(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)

"""The schema of what is read back: a record's header and lines, and a summary."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST_INT, LARGEST = 2**63 - 1, sys.float_info.max
"""Numbers are put into arrays of 64 bits."""
MOST_CLIENTS = 10**8
"""Arrays have an entry for each client, and tables one for each client and label."""


class Misfit(Exception):  # noqa: N818 (what a reader makes a message of)
    """The field that does not fit, what it must be, and what it is."""

    def __init__(self, path: str, words: str, *value: object) -> None:
        super().__init__(path, words, *value)
        self.path, self.words, self.value = path, words, value

    def under(self, name: str) -> "Misfit":
        return Misfit(f"{name}.{self.path}" if self.path else name, self.words, *self.value)

    def __str__(self) -> str:
        if not self.value:
            return f"{self.path} is missing"
        shown = repr(self.value[0])
        return f"{self.path or 'it'} must be {self.words}, got {shown if len(shown) <= 60 else shown[:57] + '...'}"


Check = Callable[[Any], None]
"""Raises ``Misfit``."""


@dataclass(frozen=True)
class Kind:
    """What a plain value may be: its types, perhaps a test of it, and how to say so."""

    words: str
    types: tuple[type, ...]
    test: Callable[[Any], bool] | None = None

    def check(self, value: object) -> None:
        if type(value) not in self.types or not (self.test is None or self.test(value)):
            raise Misfit("", self.words, value)


NUMBERS = (int, float)
Whole = Annotated[int, Kind("a whole number", (int,), lambda value: -LARGEST_INT <= value <= LARGEST_INT)]
Count = Annotated[int, Kind("a whole number of at least 0", (int,), lambda value: 0 <= value <= LARGEST_INT)]
MOST_DEPTH = 100
Client = Annotated[
    int, Kind("a whole number of at least 0 and below 100,000,000", (int,), lambda value: 0 <= value < MOST_CLIENTS)
]
Every = Annotated[int, Kind("a whole number of at least 1", (int,), lambda value: 1 <= value <= LARGEST_INT)]
Seconds = Annotated[float, Kind("a finite number of at least 0", NUMBERS, lambda value: 0 <= value <= LARGEST)]
Finite = Annotated[float, Kind("a finite number", NUMBERS, lambda value: -LARGEST <= value <= LARGEST)]
Label = Annotated[
    str, Kind("a whole number below 100,000 as text", (str,), lambda text: text.isascii() and text.isdigit() and len(text) < 6)
]
PLAIN: dict[Any, Kind] = {
    int: Kind("a whole number", (int,)),
    float: Kind("a number", NUMBERS, lambda value: type(value) is float or -LARGEST <= value <= LARGEST),
    str: Kind("a text", (str,)),
    bool: Kind("true or false", (bool,)),
    NoneType: Kind("null", (NoneType,)),
}


class Clients(TypedDict, total=False):
    """Who takes part. Of very many, how many there are of which kind; a deployed run says nothing."""

    examples: list[Count]
    classes: list[str]
    labels: list[dict[Label, Count]]
    num_clients: Annotated[
        int, Kind("a whole number of at least 0, at most 100,000,000", (int,), lambda value: 0 <= value <= MOST_CLIENTS)
    ]
    num_examples: Count
    examples_at: dict[str, Count]
    class_counts: dict[str, Any] | None


class Header(TypedDict):
    """The first line of a record: what the run is."""

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
    """Of a client, about no job. It may name a client that there is not."""

    time: Seconds
    client: Whole
    status: str
    reason: NotRequired[str]
    code: NotRequired[str]


AnswerLine = TypedDict(
    "AnswerLine",
    {
        "time": Seconds,
        "client": Client,
        "status": str,
        "reason": NotRequired[str],
        "code": NotRequired[str],
        "dispatch": Count,
        "base": Count,
        "staleness": Count,
        "class": NotRequired[str],
    },
)
"""The answer to a job, with the norm of its update and numbers of the client's own."""


class VersionLine(TypedDict):
    """Numbers of the method's own stand beside these."""

    version: Count
    time: Seconds


class EvaluationLine(TypedDict):
    """The task's own scores stand beside these, and may be anything."""

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
    """A summary's privacy: client by client, or of very many how many have which epsilon."""

    delta: float
    largest_epsilon: float
    epsilon: NotRequired[dict[str, float]]
    epsilon_by_reports: NotRequired[list[SpentBy]]


NUMBERS_BESIDE: tuple[Any, ...] = (AnswerLine, VersionLine)
"""Fields that these do not name are numbers."""


def is_number(value: object) -> bool:
    """For what may be anything: is it a number that a float can hold?"""
    return type(value) is float or (type(value) is int and -LARGEST <= value <= LARGEST)


def check_line(line: Mapping[str, Any]) -> None:
    """Any line of a record. Events that this version does not know are a later one's."""
    event = line.get("event")
    if type(event) is not str:
        raise Misfit("event", "a text", *([line["event"]] if "event" in line else ()))
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
                raise Misfit(f"{part}.name", "a text", name)


def _check_depth(line: Mapping[str, Any]) -> None:
    """Parts that may be anything are gone through by recursion."""
    for name, value in line.items():
        level = [value]
        for _ in range(MOST_DEPTH):
            level = [
                each for one in level for each in (one.values() if type(one) is dict else one if type(one) is list else ())
            ]
        if level:
            raise Misfit(name, f"nested at most {MOST_DEPTH} deep", value)


def _check_sizes(clients: Mapping[str, Any]) -> None:
    sizes = {name: len(clients[name]) for name in ("examples", "classes", "labels") if name in clients}
    for name, size in sizes.items():
        if size != (most := max(sizes.values())):
            raise Misfit(f"clients.{name}", f"a list of as many clients as the others ({most})", f"{size} entries")


def check_fields(cls: Any, tree: Any) -> dict[str, Any]:
    """What fits the fields of a dataclass, without what it does not have."""
    _check(cls)(tree)
    return {f.name: tree[f.name] for f in fields(cls) if f.name in tree}


def loaded(text: bytes) -> Any:
    """JSON of a file; an error is always a ``ValueError`` of a few words."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


LINES: dict[str, Any] = {"header": Header, "dispatch": DispatchLine, "version": VersionLine, "evaluation": EvaluationLine}


@cache
def _check(hint: Any) -> Check:
    """The check of a type, made once."""
    if hint is Any:
        return lambda value: None
    if hint in PLAIN:
        return PLAIN[hint].check
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next(each.check for each in inner if isinstance(each, Kind))
    if origin is Literal:
        return Kind(" or ".join(map(repr, inner)), (str,), lambda value: value in inner).check
    if origin in (UnionType, Union):
        return _either(inner)
    if origin is list:
        return _each(_check(inner[0]))
    if origin is dict:
        return _entries(_check(inner[0]), _check(inner[1]))
    return _table(hint)


def _either(options: tuple[Any, ...]) -> Check:
    """Of a type or null: what is not null must be of the type."""
    (other,) = (_check(option) for option in options if option is not NoneType)

    def check(value: Any) -> None:
        if value is not None:
            other(value)

    return check


def _each(item: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not list:
            raise Misfit("", "a list", value)
        for place, each in enumerate(value):
            try:
                item(each)
            except Misfit as error:
                raise error.under(str(place)) from None

    return check


def _entries(key: Check, item: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Misfit("", "a table", value)
        for name, each in value.items():
            try:
                key(name)
                item(each)
            except Misfit as error:
                raise error.under(name) from None

    return check


def _table(cls: Any) -> Check:
    """Of a TypedDict or a dataclass: the fields it must have, those it may have, and perhaps numbers beside them."""
    hints = {"event": str, **get_type_hints(cls, include_extras=True)}
    needed = _needed(cls)
    rules = {name: _rule(get_args(hint)[0] if get_origin(hint) is NotRequired else hint) for name, hint in hints.items()}
    beside = _rule(Finite if cls in NUMBERS_BESIDE else Any)

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Misfit("", "a table", value)
        for name, each in value.items():
            types, test, exact = rules.get(name, beside)
            if type(each) not in types or not (test is None or test(each)):
                try:
                    exact(each)
                except Misfit as error:
                    raise error.under(name) from None
        if not needed <= value.keys():
            raise Misfit(next(name for name in rules if name in needed and name not in value), "")

    return check


def _rule(hint: Any) -> tuple[tuple[type, ...], Callable[[Any], bool] | None, Check]:
    """A check, and before it, of a plain value, its types and test: there are millions of lines."""
    kind = PLAIN.get(hint) or next((each for each in get_args(hint) if isinstance(each, Kind)), None)
    return ((), None, _check(hint)) if kind is None else (kind.types, kind.test, kind.check)


def _needed(cls: Any) -> frozenset[str]:
    if is_typeddict(cls):
        return frozenset(cls.__required_keys__)
    return frozenset(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)

"""Checks JSON values against type hints: TypedDicts, dataclasses, lists, dicts, and plain values with a range."""

import json
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST_INT, LARGEST = 2**63 - 1, sys.float_info.max
"""Limits of numbers: they are stored in 64-bit arrays."""


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


def whole(description: str, low: int, high: int = LARGEST_INT) -> PlainType:
    return PlainType(f"a whole number{description}", (int,), lambda value: low <= value <= high)


NUMBERS = (int, float)
PLAIN: dict[Any, PlainType] = {
    int: PlainType("a whole number", (int,)),
    float: PlainType("a number", NUMBERS, lambda value: type(value) is float or -LARGEST <= value <= LARGEST),
    str: PlainType("a text", (str,)),
    bool: PlainType("true or false", (bool,)),
    NoneType: PlainType("null", (NoneType,)),
}


def is_number(value: object) -> bool:
    """Is this a number that a float can hold?"""
    return type(value) is float or (type(value) is int and -LARGEST <= value <= LARGEST)


def loaded(text: bytes) -> Any:
    """Parse JSON. All errors are ``ValueError`` with a short message."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@cache
def check_of(hint: Any, extra: Any = Any) -> Check:
    """Build the check of a type hint. Further fields of a table must be of the type ``extra``."""
    if hint is Any:
        return lambda value: None
    if plain := _plain(hint):
        return plain.check
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return PlainType(" or ".join(map(repr, inner)), (str,), lambda value: value in inner).check
    if origin in (UnionType, Union):
        (other,) = (check_of(option) for option in inner if option is not NoneType)
        return lambda value: None if value is None else other(value)
    if origin is list:
        return _each(check_of(inner[0]))
    if origin is dict:
        return _entries(check_of(inner[0]), check_of(inner[1]))
    return _table(hint, extra)


def _plain(hint: Any) -> PlainType | None:
    return PLAIN.get(hint) or next((each for each in get_args(hint) if isinstance(each, PlainType)), None)


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


def _table(cls: Any, extra: Any) -> Check:
    """Build the check of a TypedDict or a dataclass, including its required fields and the type of further fields."""
    hints = {"event": str, **get_type_hints(cls, include_extras=True)}
    required = _required(cls)
    rules = {name: _rule(get_args(hint)[0] if get_origin(hint) is NotRequired else hint) for name, hint in hints.items()}
    further = _rule(extra)

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise SchemaError("", "a table", value)
        for name, each in value.items():
            types, test, exact = rules.get(name, further)
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
    plain = _plain(hint)
    return ((), None, check_of(hint)) if plain is None else (plain.types, plain.test, plain.check)


def _required(cls: Any) -> frozenset[str]:
    if is_typeddict(cls):
        return frozenset(cls.__required_keys__)
    return frozenset(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)

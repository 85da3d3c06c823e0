"""A user's own task or method as far as it can be written down: the names of its classes and their plain fields.

It cannot be built again from that, but a resumed run can be told from another one.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from math import isfinite
from types import FunctionType
from typing import Any

from torch import nn

MOST_ITEMS = 100
"""A longer list is data and no setting: it is known by its length alone."""
SHORT_LIST, SHORT_TEXT = 10, 200
"""The same of lists and texts that are no fields."""
DEPTH = 2
"""How many objects are looked into, one within the other, beside the fields of dataclasses."""


def described(value: Any) -> Any:
    """A tree that JSON gives back as it was. The module of a class is left out: a script's is ``__main__`` only while it runs."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else repr(value)  # nan is unequal even to itself
    if isinstance(value, list | tuple):
        return [described(item) for item in value] if len(value) <= MOST_ITEMS else {"class": "list", "len": len(value)}
    if isinstance(value, Mapping) and len(value) <= MOST_ITEMS and all(isinstance(key, str) for key in value):
        return {key: described(child) for key, child in value.items()}
    tree: dict[str, Any] = {"class": type(value).__name__}
    if is_dataclass(value):
        tree |= {f.name: described(getattr(value, f.name)) for f in fields(value) if f.repr}
    return tree


def attributes(value: Any, path: str = "", depth: int = DEPTH, written: bool = True) -> dict[str, Any]:
    """What ``described`` leaves out, by dotted path: public attributes of objects and classes, names and defaults of functions.

    Only plain values: numbers, short texts and short lists. ``written`` says that plain fields are in ``described`` already.
    """
    found: dict[str, Any] = {}
    for name, child in _members(value).items():
        place = f"{path}.{name}" if path else name
        there = written and _is_record(value)
        if _is_plain(child):
            found |= {} if there and name in _fields(value) else {place: described(child)}
        elif there and _is_record(child):
            found |= attributes(child, place, depth)
        else:
            found |= {} if there and _name(child) == type(child).__name__ else {place: _name(child)}
            found |= attributes(child, place, depth - 1, False) if depth and not isinstance(child, nn.Module) else {}
    return found


def _members(value: Any) -> dict[str, Any]:
    """What may differ from one such value to another, by name."""
    if isinstance(value, FunctionType):
        return dict(_bound(value))
    if isinstance(value, partial):
        return {"func": value.func, **{str(place): each for place, each in enumerate(value.args)}, **value.keywords}
    if isinstance(value, type | list | tuple | Mapping):
        return {}
    every = {name: each for base in reversed(type(value).__mro__) for name, each in vars(base).items()}
    of_class = {name: each for name, each in every.items() if name[0] != "_" and _is_plain(each)}
    if _is_record(value):
        of_fields = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
        return {name: each for name, each in of_class.items() if name not in _fields(value)} | of_fields
    # What the class defines otherwise than as a plain value is computed and kept: a cached property.
    own = {name: each for name, each in getattr(value, "__dict__", {}).items() if name in of_class or name not in every}
    return of_class | {name: each for name, each in own.items() if isinstance(name, str) and name[:1] != "_"}


def _bound(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has besides its code: the variables it closes over, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is still empty
            yield name, cell.cell_contents
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _name(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    return value.__qualname__ if isinstance(value, FunctionType | type) else type(value).__name__


def _fields(value: Any) -> set[str]:
    return {f.name for f in fields(value)}


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= SHORT_LIST and all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= SHORT_TEXT)

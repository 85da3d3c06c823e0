"""A user's own task or method as far as it can be written down: the names of its classes and their plain fields.

It cannot be built again from that, but a resumed run can be told from another one.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

MOST_ITEMS = 100
"""A longer list is data and no setting: it is known by its length alone."""


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

"""``Sink``: where numbers of a run go. A user's own is a class with these two methods."""

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    def log(self, version: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``{"local": {"epochs": 2}}`` as ``{"local.epochs": 2}``."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found

"""Stand-ins for packages that a peer imports at its top and that this job never calls (plots, trackers, accountants).

On a machine without a network a peer then still imports. Whoever calls anything of a stand-in is told so, loudly.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _Missing:
    """A name of a package that is not here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError(f"{type(self).__name__} is a stand-in: its package is not installed")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Missing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> object:
        if name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*names: str) -> list[str]:
    """Stand in for those of ``names`` that are not installed; which they are."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(frozenset(absent)))
    return absent

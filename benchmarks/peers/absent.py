"""Stand-ins for packages that a peer imports at its top and that this job never calls (plots, trackers, accountants).

A peer then still imports on a machine without a network, or where such a package was built for another torch. Whoever calls
anything of a stand-in is told so, loudly.
"""

import importlib
import importlib.abc
import importlib.machinery
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
    """Stand in for those of ``names`` that cannot be imported; which they are."""
    absent = [name for name in names if not _imports(name)]
    sys.meta_path.insert(0, _Finder(frozenset(absent)))
    return absent


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # one that is broken raises anything
        for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[loaded]
        return False
    return True

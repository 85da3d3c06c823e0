"""Merges a recipe or file with changes into one table of settings, without importing torch.

The recipes' values and all defaults are read from ``settings.json``, which a test compares with the recipes themselves.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedecho.runs.settings import resolve_paths, setting_of
from fedecho.runs.suggestions import ConfigError, unknown
from fedecho.storage.user_files import read_toml

Tree = dict[str, Any]
DATA = Path(__file__).with_name("settings.json")
VERSIONS = "versions"
"""The command line's short name for ``num_versions``."""
CHOICES = {"task": "tasks", "algorithm": "algorithms", "inner": "algorithms", "partition": "partitions"}
"""Fields that hold one of several classes, and the kind of class. The ``name`` in the field's table selects the class."""


@cache
def declared() -> Tree:
    """Return the contents of ``settings.json``: the defaults of each class, by kind and name, and each recipe's other values.

    A default of None stands for a setting that is left out, or that must be given.
    """
    return dict(json.loads(DATA.read_text(encoding="utf-8")))


def resolved(source: str, *, algorithm: str | None = None, seed: int | None = None, settings: Sequence[str] = ()) -> Tree:
    """Return the whole table of an experiment: ``to_config(load(...))``, but no value is checked."""
    return with_defaults(merged_onto(source, stored_recipe, algorithm=algorithm, seed=seed, settings=settings))


def stored_recipe(name: str, method: str) -> Tree:
    """Return the values of a recipe, for a method, that are not defaults."""
    return dict(declared()["recipes"][name][method])


def with_defaults(tree: Mapping[str, Any]) -> Tree:
    """Fill in the default of each setting that a table lacks. Task and method get the run's seed and number of clients."""
    task = tree.get("task")
    num_clients = task.get("num_clients") if isinstance(task, Mapping) else None
    if isinstance(task, Mapping) and num_clients is None:
        num_clients = declared()["tasks"].get(str(task.get("name")), {}).get("num_clients")
    return _filled(tree, declared()["experiment"], "", {"seed": tree.get("seed", 0), "num_clients": num_clients})


def _filled(tree: Any, defaults: Mapping[str, Any], path: str, inherited: Mapping[str, Any]) -> Tree:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path.removesuffix('.')} must be a table, got {tree!r}")
    if wrong := [key for key in tree if key not in defaults and key != "name"]:
        raise ConfigError(unknown(path + wrong[0], defaults, "key"))
    full = {"name": tree["name"]} if "name" in tree and "name" not in defaults else {}
    for key, default in defaults.items():
        value = tree.get(key, default)
        if key in CHOICES and isinstance(value, Mapping):
            kind = declared()[CHOICES[key]]
            chosen = kind[among(value.get("name"), kind, f"{path}{key}.name")]
            derived = {} if key == "partition" else {name: value for name, value in inherited.items() if name in chosen}
            value = _filled(value, chosen | derived, f"{path}{key}.", inherited)
        elif isinstance(default, Mapping):
            value = _filled(value, default, f"{path}{key}.", inherited)
        if value is not None:
            full[key] = value
    return full


def merged_onto(
    source: str,
    values_of: Callable[[str, str], Tree],
    *,
    algorithm: str | None = None,
    seed: int | None = None,
    versions: int | None = None,
    settings: Sequence[str] = (),
) -> Tree:
    """Merge a file's table and the changes onto the recipe's values for the method, ``values_of(recipe, method)``."""
    tree = {"recipe": source} if source in declared()["recipes"] else _named(_file(source))
    changes = {"seed": seed, "num_versions": versions}
    if algorithm is not None:
        tree = tree | {"algorithm": _another_method(algorithm, tree)}
    tree = _merged(tree, {key: value for key, value in changes.items() if value is not None})
    for setting in settings:
        tree = _merged(tree, _named(setting_of(setting)))
    return _on_recipe(tree, values_of)


def _named(tree: Tree) -> Tree:
    """Accept ``versions`` as an alias for ``num_versions``."""
    if VERSIONS not in tree:
        return tree
    if "num_versions" in tree:
        raise ConfigError("versions and num_versions are the same setting: give only one of them")
    return {"num_versions" if key == VERSIONS else key: value for key, value in tree.items()}


def _another_method(name: str, tree: Tree) -> Tree:
    """The ``algorithm`` table for another method. A recipe supplies its values; from a file, only ``buffer_size`` is kept."""
    chosen = declared()["algorithms"][among(name, declared()["algorithms"], "algorithm")]
    old = tree.get("algorithm", {})
    if not isinstance(old, Mapping):
        return {"name": name}
    if old.get("name") == name:
        return dict(old)
    inner = old.get("inner")
    buffer_size = old.get("buffer_size", inner.get("buffer_size") if isinstance(inner, Mapping) else None)
    kept = {} if buffer_size is None or name == "fedasync" else {"buffer_size": buffer_size}
    if "inner" not in chosen:
        return {"name": name, **kept}
    if "recipe" in tree:  # the recipe sets the inner method
        return {"name": name, "inner": kept} if kept else {"name": name}
    return {"name": name, "inner": {"name": "fedbuff", **kept}}


def _file(source: str) -> Tree:
    if source.endswith(".toml") or Path(source).is_file():
        return resolve_paths(Path(source), read_toml(Path(source), "; `fedecho list` shows the recipes"))
    if source in declared()["algorithms"]:
        raise ConfigError(f"{source} is a method, not a recipe: use a recipe (`fedecho list`) with --algorithm {source}")
    raise ConfigError(unknown(source, declared()["recipes"], "recipe") + " (a file's name must end in .toml)")


def _on_recipe(tree: Tree, values_of: Callable[[str, str], Tree]) -> Tree:
    """Merge ``tree`` into its recipe's table. The recipe's values depend on the method."""
    if "recipe" not in tree:
        return tree
    name = among(tree.pop("recipe"), declared()["recipes"], "recipe")
    chosen = tree.get("algorithm", {})
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"algorithm must be a table, got {chosen!r}")
    method = among(chosen.get("name", "fedecho"), declared()["algorithms"], "algorithm.name")
    return _merged(values_of(name, method), tree)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """Merge ``changes`` into ``base``. A table with a different ``name`` replaces the old one completely."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        same = isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("name", old.get("name")) == old.get("name")
        merged[key] = _merged(old, value) if same and isinstance(old, Mapping) else value
    return merged


def among(name: Any, choices: Iterable[str], what: str) -> str:
    """Return ``name`` if it is one of ``choices``, or raise an error that suggests one."""
    if not isinstance(name, str) or name not in choices:
        raise ConfigError(unknown(str(name), choices, what))
    return name


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> list[str]:
    """List the keys whose values differ between two tables, with both values."""
    found = []
    for key in sorted({*ours, *theirs}):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{path}{key}.")
        elif a != b:
            found.append(f"{path}{key} is {b!r} there and {a!r} here")
    return found

"""Converts experiments to and from TOML. An unknown key is an error that suggests the right one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from hashlib import sha256
from math import inf, isnan
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedecho.algorithms import ALGORITHMS
from fedecho.core.ranges import SettingError
from fedecho.runs.experiment import Experiment
from fedecho.runs.recipes import RECIPES
from fedecho.runs.resolve import Tree, among, merged_onto
from fedecho.runs.resolve import differences as differences
from fedecho.runs.suggestions import KEYS, unknown
from fedecho.runs.suggestions import ConfigError as ConfigError
from fedecho.tasks import TASKS
from fedecho.tasks.partition import PARTITIONERS

MOST = 3.4e38
"""The limit for numbers, just below the largest float32."""


class UnknownKeyError(ConfigError):
    """An unknown key in a table. ``below`` is the path of a key with the same name in a nested table, if there is one."""

    def __init__(self, key: str, below: str | None, choices: Sequence[str]) -> None:
        suggests_below = below and key.rpartition(".")[2] not in KEYS
        super().__init__(f"unknown key {key!r}: did you mean {below!r}?" if suggests_below else unknown(key, choices, "key"))
        self.key, self.below = key, below


CHOICES: dict[str, dict[str, type[Any]]] = {
    "task": TASKS,
    "algorithm": ALGORITHMS,
    "inner": ALGORITHMS,
    "partition": PARTITIONERS,
}
"""Fields that hold one of several classes. The ``name`` in the field's table selects the class."""


def to_config(value: Any) -> Tree:
    """Convert an experiment, or a part of one, to a table. The inverse of ``from_config``."""
    tree: Tree = {}
    for choices in CHOICES.values():
        names = [name for name, cls in choices.items() if cls is type(value)]
        if names:
            tree["name"] = names[0]
    for f in fields(value):
        child = getattr(value, f.name)
        if f.repr and child is not None:
            tree[f.name] = to_config(child) if is_dataclass(child) else child
    return tree


def from_config(tree: Mapping[str, Any]) -> Experiment:
    """Build an experiment from its table. An error names the wrong key and the allowed values."""
    inherited = {"seed": tree.get("seed", 0)}
    task = tree.get("task")
    if isinstance(task, Mapping):
        num_clients = task.get("num_clients", _default(TASKS.get(str(task.get("name")), object), "num_clients"))
        inherited["num_clients"] = num_clients
    experiment = _construct(Experiment, tree, "", inherited)
    assert isinstance(experiment, Experiment)  # noqa: S101 (for the type checker)
    return experiment


def fingerprint(tree: Mapping[str, Any]) -> str:
    return sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def completed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the default of each setting that a configuration written by an older fedecho lacks."""
    return to_config(from_config(tree))


def load(
    source: str,
    *,
    algorithm: str | None = None,
    seed: int | None = None,
    versions: int | None = None,
    settings: Sequence[str] = (),
) -> Experiment:
    """Load an experiment from a recipe or a TOML file, with overrides.

    A file may start from a recipe (``recipe = "digits"``) and override some of its settings.
    """
    tree = merged_onto(source, _values_of, algorithm=algorithm, seed=seed, versions=versions, settings=settings)
    return from_config(tree)


def _values_of(recipe: str, method: str) -> Tree:
    return _inheriting(to_config(RECIPES[recipe].make(method)))


def _inheriting(tree: Tree) -> Tree:
    """Drop the values that are derived from the run's settings, such as seeds."""
    pruned = {key: value for key, value in tree.items() if key != "seed"}
    pruned["task"] = {key: value for key, value in tree["task"].items() if key != "seed"}
    pruned["algorithm"] = _without(tree["algorithm"], {"seed", "num_clients"})
    return pruned


def _without(tree: Tree, keys: set[str]) -> Tree:
    return {k: _without(v, keys) if isinstance(v, dict) else v for k, v in tree.items() if k not in keys}


def _construct(cls: type[Any], tree: Any, path: str, inherited: Mapping[str, Any]) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} must be a table, got {tree!r}")
    hints, settable = get_type_hints(cls), [f for f in fields(cls) if f.repr]
    names = [f.name for f in settable]
    given = {key: value for key, value in tree.items() if key != "name" or "name" in names}
    for key in given:
        if key not in names:
            below = _below(key, cls, tree)
            dotted = f"{path}{'.' if path else ''}"
            raise UnknownKeyError(dotted + key, below and dotted + below, names)
    arguments: Tree = {}
    for f in settable:
        where = f"{path}.{f.name}" if path else f.name
        if f.name in given:
            arguments[f.name] = _value(given[f.name], hints[f.name], f.name, where, inherited)
        elif f.name in inherited and _inherits(cls, f.name):
            arguments[f.name] = inherited[f.name]
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{where} is missing")
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except SettingError as error:
        raise ConfigError(f"{path}{'.' if path else ''}{error.name} {error.told}") from None
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if not path or f"{path}." in text else f"{path}: {text}") from None


def _below(key: str, cls: type[Any], tree: Mapping[str, Any]) -> str | None:
    """The path of a key with the same name in a nested table, if there is one."""
    hints = get_type_hints(cls)
    for f in fields(cls):
        table = tree.get(f.name)
        below = hints[f.name]
        if f.name in CHOICES:
            below = CHOICES[f.name].get(str(table.get("name"))) if isinstance(table, Mapping) else None
        if not (is_dataclass(below) and isinstance(below, type)):
            continue
        if key in [child.name for child in fields(below) if child.repr]:
            return f"{f.name}.{key}"
        deeper = _below(key, below, table if isinstance(table, Mapping) else {})
        if deeper:
            return f"{f.name}.{deeper}"
    return None


def _inherits(cls: type[Any], name: str) -> bool:
    """Does this field default to the run's value? Tasks and methods inherit ``seed``, methods also ``num_clients``."""
    return cls in ALGORITHMS.values() or (name == "seed" and cls in TASKS.values())


def _value(value: Any, hint: Any, name: str, path: str, inherited: Mapping[str, Any]) -> Any:
    if name in CHOICES:
        if not isinstance(value, Mapping) or "name" not in value:
            raise ConfigError(f"{path} must be a table with a name, one of {', '.join(CHOICES[name])}")
        cls = CHOICES[name][among(value["name"], CHOICES[name], f"{path}.name")]
        return _construct(cls, value, path, inherited)
    if is_dataclass(hint) and isinstance(hint, type):
        return _construct(hint, value, path, inherited)
    return _plain(value, hint, path)


def _plain(value: Any, hint: Any, path: str) -> Any:
    """Check a number, flag or string against its declared type. Integers are accepted as floats; nothing else is converted."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if option is float and value in (inf, -inf):
            return value
        if option is float and (type(value) is int or (type(value) is float and not isnan(value))):
            if abs(value) > MOST:
                raise ConfigError(f"{path} must be between -3.4e38 and 3.4e38 (the float32 range), got {str(value)[:24]}")
            return float(value)
        if option in (int, str, bool, NoneType) and type(value) is option:
            return value
    raise ConfigError(f"{path} must be {_type_names(options)}, got {value!r}")


def _type_names(options: tuple[Any, ...]) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    texts = [
        " or ".join(repr(choice) for choice in get_args(option)) if get_origin(option) is Literal else names.get(option, "")
        for option in options
    ]
    return " or ".join(text for text in texts if text)


def _default(cls: type[Any], name: str) -> Any:
    return next((f.default for f in fields(cls) if f.name == name), None) if is_dataclass(cls) else None

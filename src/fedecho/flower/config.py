"""An app's run configuration, and key-value pairs in Flower's command-line syntax. Free of torch."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from flwr.common.config import flatten_dict, get_project_config, parse_config_args

from fedecho.core.ranges import Seed, SettingError, at_least, check_ranges
from fedecho.storage.user_files import read_toml

if TYPE_CHECKING:
    from fedecho.runs.experiment import Experiment


PAUSE = at_least(0, most=1e6)
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A key ``min-nodes`` is the field ``min_nodes``. Keys that are not ours are the app's own business."""

    recipe: str = "digits"
    """A recipe of ``fedecho list``."""
    algorithm: str = ""
    seed: Seed = 0
    versions: Annotated[int, at_least(0, most=10**7)] = 0
    """0: as the recipe says."""
    settings: str = ""
    """Changes to the recipe, ``task.num_clients=6 concurrency=5``."""
    out: str = ""
    """The server's run folder. A run that was stopped there goes on. Empty: nothing is kept."""
    other_software: bool = False
    """Go on with a run that other software began; its record will say so."""
    min_nodes: Annotated[int, at_least(1, most=10**6)] = 1
    timeout_s: Annotated[float, at_least(0, most=1e8)] = 3600.0
    worker: bool = True
    """Clients train in the node's persistent worker."""
    threads: Annotated[int, at_least(0, most=4096)] = 0
    """Of torch; 0: as torch chooses. With 1, sums round the same way on every machine of a kind."""

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Settings":
        found = {}
        for field in fields(cls):
            key = field.name.replace("_", "-")
            if key in run_config:
                found[field.name] = _typed(key, run_config[key], type(field.default))
        try:
            return cls(**found)
        except SettingError as error:
            raise ValueError(f"{error.name.replace('_', '-')} in the app's configuration {error.told}") from None


def experiment(run_config: Mapping[str, Any]) -> "Experiment":
    """The recipe that the configuration names, with its changes."""
    from fedecho.runs.config import load

    told = Settings.of(run_config)
    return load(
        told.recipe,
        algorithm=told.algorithm or None,
        seed=told.seed,
        versions=told.versions or None,
        settings=told.settings.split(),
    )


def pause_of(node_config: Mapping[str, Any]) -> float:
    """How much slower a node shall be than it is, in seconds a message."""
    pause = float(_typed("pause-s", node_config.get("pause-s", 0.0), float))
    if fault := PAUSE.fault(pause):
        raise ValueError(f"pause-s in the node's configuration {fault}")
    return pause


def in_simulation() -> bool:
    """Flower's simulation engine keeps its processes: a worker behind them would gain nothing."""
    return "ray" in sys.modules


def _typed(key: str, value: Any, kind: type[Any]) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise ValueError(f"{key} in the app's configuration must be {words[kind]}, got {value!r}")
    return value


PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)(?=\s|$)")
"""What Flower takes for a pair."""
KEY = re.compile(r"[\w.-]+", re.ASCII)
PROJECT = "pyproject.toml"


def key_values(option: str, texts: Sequence[str], ours: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of an option that may be given again and again, or of TOML files, with what options of our own say.

    ``ours`` is, by key, our option and its value (None: not given). What is said twice must be the same.
    """
    found = {key: value for key, (_, value) in ours.items() if value is not None}
    for text in texts:
        for key, value in _of_one(option, text).items():
            if key in found and found[key] != value:
                other = ours[key][0] if key in ours else option
                raise ValueError(f"{key!r} is {found[key]!r} by {other} and {value!r} by {option}: which?")
            found[key] = value
    return found


def as_words(option: str, told: Mapping[str, Any]) -> str:
    """The pairs as Flower reads them."""
    return " ".join(f"{_key(option, key)}={_value(option, key, value)}" for key, value in told.items())


def check_run_config(app: Path, told: Mapping[str, Any]) -> None:
    """An app has the keys that its pyproject.toml names and no others, ours (``out``, ``versions``) included."""
    if not (app / PROJECT).is_file():
        return  # ``flwr run`` says what is wrong with it
    read_toml(app / PROJECT)  # Flower's own reader has no limits
    try:
        known = flatten_dict(get_project_config(app)["tool"]["flwr"]["app"].get("config", {}))
    except ValueError as error:
        raise ValueError(f"{app / PROJECT}: {_one_line(error)}") from None
    if unknown := sorted(told.keys() - known.keys()):
        has = ", ".join(sorted(known)) or "nothing"
        where = f"[tool.flwr.app.config] of {app / PROJECT}"
        raise ValueError(f"the app has no {unknown[0]!r} in its configuration: add it to {where}, which has {has}")


def _of_one(option: str, text: str) -> dict[str, Any]:
    in_file = text.endswith(".toml") and "=" not in text
    if not in_file and (not text.strip() or PAIR.sub("", text).strip()):
        raise ValueError(
            f"{option} takes key=value pairs, such as 'num-partitions=3 name=\"a b\"', or a TOML file, not {text!r}"
        )
    try:
        if in_file:
            read_toml(Path(text))  # Flower's own reader has no limits
        return parse_config_args([text if in_file else f"{text} "])  # a pair that ends in .toml is no file
    except (click.ClickException, OSError, ValueError) as error:
        raise ValueError(f"{option} cannot be read from {text!r}: {_one_line(error)}") from None


def _key(option: str, key: str) -> str:
    if not KEY.fullmatch(key):
        raise ValueError(f"{option}: Flower takes no key {key!r}: letters, digits, '-', '_' and '.' alone")
    return key


def _value(option: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    for quote, forbidden in (('"', '"\\'), ("'", "'")):
        if value.isprintable() and not any(sign in value for sign in forbidden):
            return f"{quote}{value}{quote}"
    raise ValueError(f"{option}: {key} = {value!r} has both kinds of quotes or is more than a line, which Flower cannot take")


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, click.ClickException) else str(error)
    return " ".join(text.split())

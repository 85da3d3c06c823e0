"""The run configuration of an app, and key-value pairs in Flower's command-line syntax. Free of torch."""

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


PAUSE_S = at_least(0, most=1e6)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a deployed run. The key ``min-nodes`` sets ``min_nodes``; unknown keys belong to the app."""

    recipe: str = "digits"
    """A recipe from ``fedecho list``."""
    algorithm: str = ""
    seed: Seed = 0
    versions: Annotated[int, at_least(0, most=10**7)] = 0
    """0: use the recipe's."""
    settings: str = ""
    """Changes to the recipe, such as ``task.num_clients=6 concurrency=5``."""
    out: str = ""
    """The run folder on the server. A stopped run in it is resumed. Empty: nothing is saved."""
    other_software: bool = False
    """Resume a run that was started with other software versions; the record notes the change."""
    min_nodes: Annotated[int, at_least(1, most=10**6)] = 1
    timeout_s: Annotated[float, at_least(0, most=1e8)] = 3600.0
    worker: bool = True
    """Train in the node's persistent worker instead of Flower's process."""
    threads: Annotated[int, at_least(0, most=4096)] = 0
    """Number of torch threads; 0: torch's default. With 1, results are identical on machines with the same CPU type."""

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Settings":
        values = {}
        for field in fields(cls):
            key = field.name.replace("_", "-")
            if key in run_config:
                values[field.name] = _typed(key, run_config[key], type(field.default))
        try:
            return cls(**values)
        except SettingError as error:
            raise ValueError(f"{error.name.replace('_', '-')} in the app's configuration {error.told}") from None


def experiment(run_config: Mapping[str, Any]) -> "Experiment":
    """The experiment that a run configuration describes: a recipe and changes to it."""
    from fedecho.runs.config import load

    settings = Settings.of(run_config)
    return load(
        settings.recipe,
        algorithm=settings.algorithm or None,
        seed=settings.seed,
        versions=settings.versions or None,
        settings=settings.settings.split(),
    )


def pause_of(node_config: Mapping[str, Any]) -> float:
    """The artificial delay of each job on a node, in seconds."""
    pause = float(_typed("pause-s", node_config.get("pause-s", 0.0), float))
    if fault := PAUSE_S.fault(pause):
        raise ValueError(f"pause-s in the node's configuration {fault}")
    return pause


def in_simulation() -> bool:
    """Whether this is Flower's simulation engine, whose processes persist, so that a worker is not needed."""
    return "ray" in sys.modules


def _typed(key: str, value: Any, kind: type[Any]) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise ValueError(f"{key} in the app's configuration must be {names[kind]}, got {value!r}")
    return value


PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)(?=\s|$)")
"""A pair in Flower's syntax."""
KEY = re.compile(r"[\w.-]+", re.ASCII)
PROJECT = "pyproject.toml"


def key_values(option: str, texts: Sequence[str], ours: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Merge the pairs of a repeatable option, given directly or as TOML files, with dedicated options.

    ``ours`` maps a key to its dedicated option and value (None: not given). Raises ValueError if a key has two values.
    """
    pairs = {key: value for key, (_, value) in ours.items() if value is not None}
    for text in texts:
        for key, value in _parse(option, text).items():
            if key in pairs and pairs[key] != value:
                other = ours[key][0] if key in ours else option
                raise ValueError(f"{key!r} is {pairs[key]!r} by {other} and {value!r} by {option}: give it only once")
            pairs[key] = value
    return pairs


def as_words(option: str, pairs: Mapping[str, Any]) -> str:
    """The pairs in Flower's syntax."""
    return " ".join(f"{_key(option, key)}={_value(option, key, value)}" for key, value in pairs.items())


def check_run_config(app: Path, config: Mapping[str, Any]) -> None:
    """Reject keys that the app's pyproject.toml does not declare, including our own such as ``out``."""
    if not (app / PROJECT).is_file():
        return  # ``flwr run`` reports the error
    read_toml(app / PROJECT)  # checks the size, which Flower does not
    try:
        declared = flatten_dict(get_project_config(app)["tool"]["flwr"]["app"].get("config", {}))
    except ValueError as error:
        raise ValueError(f"{app / PROJECT}: {_one_line(error)}") from None
    if unknown := sorted(config.keys() - declared.keys()):
        names = ", ".join(sorted(declared)) or "no keys"
        where = f"[tool.flwr.app.config] of {app / PROJECT}"
        raise ValueError(f"the app has no setting {unknown[0]!r}: add it to {where}, which has {names}")


def _parse(option: str, text: str) -> dict[str, Any]:
    in_file = text.endswith(".toml") and "=" not in text
    if not in_file and (not text.strip() or PAIR.sub("", text).strip()):
        raise ValueError(
            f"{option} takes key=value pairs, such as 'num-partitions=3 name=\"a b\"', or a TOML file, got {text!r}"
        )
    try:
        if in_file:
            read_toml(Path(text))  # checks the size, which Flower does not
        return parse_config_args(
            [text if in_file else f"{text} "]
        )  # the space keeps a pair that ends in .toml from being read as a file
    except (click.ClickException, OSError, ValueError) as error:
        raise ValueError(f"cannot read {option} from {text!r}: {_one_line(error)}") from None


def _key(option: str, key: str) -> str:
    if not KEY.fullmatch(key):
        raise ValueError(f"{option}: Flower does not accept the key {key!r}: use letters, digits, '-', '_' and '.' only")
    return key


def _value(option: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    for quote, forbidden in (('"', '"\\'), ("'", "'")):
        if value.isprintable() and not any(sign in value for sign in forbidden):
            return f"{quote}{value}{quote}"
    raise ValueError(f"{option}: {key} = {value!r} has both kinds of quotes or several lines, which Flower does not accept")


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, click.ClickException) else str(error)
    return " ".join(text.split())

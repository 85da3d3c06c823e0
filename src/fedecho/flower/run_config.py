"""What an app's configuration says (``[tool.flwr.app.config]``, ``flwr run --run-config``). Free of torch."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from fedecho.core.ranges import Seed, SettingError, at_least, check_ranges

if TYPE_CHECKING:
    from fedecho.experiments.experiment import Experiment


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
    from fedecho.experiments.config import load

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

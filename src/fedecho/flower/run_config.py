"""What an app's configuration says (``[tool.flwr.app.config]``, ``flwr run --run-config``). Free of torch."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedecho.experiments.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A key ``min-nodes`` is the field ``min_nodes``. Keys that are not ours are the app's own business."""

    recipe: str = "digits"
    """A recipe of ``fedecho list``."""
    algorithm: str = ""
    seed: int = 0
    versions: int = 0
    """0: as the recipe says."""
    settings: str = ""
    """Changes to the recipe, ``task.num_clients=6 concurrency=5``."""
    out: str = ""
    """The server's run folder. A run that was stopped there goes on. Empty: nothing is kept."""
    other_software: bool = False
    """Go on with a run that other software began; its record will say so."""
    min_nodes: int = 1
    timeout_s: float = 3600.0
    worker: bool = True
    """Clients train in the node's persistent worker."""
    threads: int = 0
    """Of torch; 0: as torch chooses. With 1, sums round the same way on every machine of a kind."""

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Settings":
        found = {}
        for field in fields(cls):
            key = field.name.replace("_", "-")
            if key in run_config:
                found[field.name] = _typed(key, run_config[key], type(field.default))
        return cls(**found)


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
    return float(_typed("pause-s", node_config.get("pause-s", 0.0), float))


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

"""What a run is: its configuration, the header of its record, and the digest of its model."""

import platform
import sys
import time
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedecho.core.types import Weights
from fedecho.experiments.build import Simulation
from fedecho.experiments.config import ConfigError, differences, from_config, to_config
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.record import Line, read_header
from fedecho.experiments.summary import SUMMARY
from fedecho.version import __version__


def check_same(folder: Path, experiment: Experiment) -> None:
    """Is the run in ``folder`` one of this experiment? A user's own parts cannot be compared and are trusted."""
    header = read_header(folder)
    ours, theirs = config_of(experiment), header["config"]
    if ours is None or theirs is None:
        ours = {name: getattr(experiment, name) for name in ("name", "seed", "num_versions")}
        theirs = {name: header[name] for name in ours}
    found = differences(ours, theirs)
    if found:
        raise ConfigError(f"{folder} holds a run of another configuration: {'; '.join(found[:3])}")


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def model_digest(weights: Weights) -> str:
    digest = sha256(weights.params.cpu().numpy().tobytes())
    digest.update(weights.buffers.cpu().numpy().tobytes())
    return digest.hexdigest()


def name_of(algorithm: Any) -> str:
    named = to_config(algorithm).get("name") if is_dataclass(algorithm) else None
    return str(named or type(algorithm).__name__)


def config_of(experiment: Experiment) -> Line | None:
    """The experiment as a table, or None if a part of it is a user's own and cannot be written down."""
    try:
        tree = to_config(experiment)
        return tree if to_config(from_config(tree)) == tree else None
    except (TypeError, ValueError):
        return None


def header_of(simulation: Simulation, config: Line | None, execution: Line) -> Line:
    task = simulation.experiment.task
    classes = [simulation.runtimes.class_of(client) for client in range(task.num_clients)]
    return {
        "format": 1,
        "name": simulation.experiment.name,
        "algorithm": name_of(simulation.experiment.algorithm),
        "config": config,
        "seed": simulation.experiment.seed,
        "num_versions": simulation.experiment.num_versions,
        "execution": execution,
        "software": {
            "fedecho": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
        },
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "num_params": simulation.layout.num_params,
        "num_unlabeled": task.num_unlabeled,
        "clients": {
            "examples": [task.num_examples(client) for client in range(task.num_clients)],
            "classes": classes,
            **_labels(task),
        },
    }


def _labels(task: Any) -> Line:
    """Who holds which classes, of a task that says so."""
    if not hasattr(task, "label_counts"):
        return {}
    return {"labels": [{str(k): int(n) for k, n in task.label_counts(c).items()} for c in range(task.num_clients)]}

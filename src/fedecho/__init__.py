"""FedEcho: asynchronous federated learning with uncertainty-aware distillation.

Names are imported on first use, so that processes that need no torch start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedecho.version import __version__

if TYPE_CHECKING:
    from fedecho.algorithms import ALGORITHMS, CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho, FedEchoPlus
    from fedecho.core.algorithm import Algorithm, Demands
    from fedecho.core.task import Task
    from fedecho.core.types import Advance, Arrival, ClientUpdate, GlobalModel, Weights
    from fedecho.distill.distiller import Distiller
    from fedecho.learning.local import LocalTraining
    from fedecho.runs.config import load
    from fedecho.runs.experiment import Experiment
    from fedecho.runs.recipes import RECIPES
    from fedecho.runs.run import Result, resume, simulate
    from fedecho.runs.trained import trained
    from fedecho.simulation.faults import Faults
    from fedecho.simulation.runtimes import Runtimes
    from fedecho.tasks import TASKS, CifarTask, DigitsTask
    from fedecho.tasks.partition import DirichletPartitioner, HeldClassesPartitioner, IidPartitioner, ShardPartitioner

__all__ = [
    "ALGORITHMS",
    "CA2FL",
    "FADAS",
    "RECIPES",
    "TASKS",
    "Advance",
    "Algorithm",
    "Arrival",
    "CifarTask",
    "ClientUpdate",
    "Demands",
    "DigitsTask",
    "DirichletPartitioner",
    "Distiller",
    "Experiment",
    "Faults",
    "FedAC",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedEcho",
    "FedEchoPlus",
    "GlobalModel",
    "HeldClassesPartitioner",
    "IidPartitioner",
    "LocalTraining",
    "Result",
    "Runtimes",
    "ShardPartitioner",
    "Task",
    "Weights",
    "__version__",
    "load",
    "resume",
    "simulate",
    "trained",
]

WHERE = {
    "ALGORITHMS": "fedecho.algorithms",
    "Advance": "fedecho.core.types",
    "Algorithm": "fedecho.core.algorithm",
    "Arrival": "fedecho.core.types",
    "CA2FL": "fedecho.algorithms",
    "CifarTask": "fedecho.tasks",
    "ClientUpdate": "fedecho.core.types",
    "Demands": "fedecho.core.algorithm",
    "DigitsTask": "fedecho.tasks",
    "DirichletPartitioner": "fedecho.tasks.partition",
    "Distiller": "fedecho.distill.distiller",
    "Experiment": "fedecho.runs.experiment",
    "FADAS": "fedecho.algorithms",
    "Faults": "fedecho.simulation.faults",
    "FedAC": "fedecho.algorithms",
    "FedAsync": "fedecho.algorithms",
    "FedAvg": "fedecho.algorithms",
    "FedBuff": "fedecho.algorithms",
    "FedEcho": "fedecho.algorithms",
    "FedEchoPlus": "fedecho.algorithms",
    "GlobalModel": "fedecho.core.types",
    "IidPartitioner": "fedecho.tasks.partition",
    "LocalTraining": "fedecho.learning.local",
    "RECIPES": "fedecho.runs.recipes",
    "Result": "fedecho.runs.run",
    "Runtimes": "fedecho.simulation.runtimes",
    "HeldClassesPartitioner": "fedecho.tasks.partition",
    "ShardPartitioner": "fedecho.tasks.partition",
    "TASKS": "fedecho.tasks",
    "Task": "fedecho.core.task",
    "Weights": "fedecho.core.types",
    "load": "fedecho.runs.config",
    "resume": "fedecho.runs.run",
    "simulate": "fedecho.runs.run",
    "trained": "fedecho.runs.trained",
}
"""The module of every public name, equal to the imports above."""


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module 'fedecho' has no attribute {name!r}")
    value = getattr(import_module(WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *WHERE})

"""FedEcho: asynchronous federated learning with uncertainty-aware distillation."""

from fedecho.algorithms import ALGORITHMS, CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.core.algorithm import Algorithm, Demands
from fedecho.core.task import Task
from fedecho.core.types import Advance, Arrival, ClientUpdate, GlobalModel, Weights
from fedecho.data.partition import DirichletPartitioner, IidPartitioner, ShardPartitioner
from fedecho.distill.distiller import Distiller
from fedecho.experiments.config import load
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.recipes import RECIPES
from fedecho.experiments.run import Result, resume, simulate
from fedecho.learning.local import LocalTraining
from fedecho.simulation.faults import Faults
from fedecho.simulation.runtimes import Runtimes
from fedecho.tasks import TASKS, CifarTask, DigitsTask
from fedecho.version import __version__

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
    "GlobalModel",
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
]

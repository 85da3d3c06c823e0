"""What is learnt. ``TASKS`` is the one table from names to classes."""

from typing import Any

from fedecho.core.task import Task
from fedecho.tasks.cifar import CifarTask
from fedecho.tasks.digits import DigitsTask
from fedecho.tasks.mathinstruct import MathInstructTask
from fedecho.tasks.mrpc import MrpcTask

TASKS: dict[str, type[Any]] = {
    "digits": DigitsTask,
    "cifar": CifarTask,
    "mrpc": MrpcTask,
    "mathinstruct": MathInstructTask,
}

__all__ = ["TASKS", "CifarTask", "DigitsTask", "MathInstructTask", "MrpcTask", "Task"]

"""``TASKS``: the one table from task names to classes."""

from typing import Any

from fedecho.tasks.text.mathinstruct import MathInstructTask
from fedecho.tasks.text.mrpc import MrpcTask
from fedecho.tasks.vision.cifar import CifarTask
from fedecho.tasks.vision.digits import DigitsTask

TASKS: dict[str, type[Any]] = {
    "digits": DigitsTask,
    "cifar": CifarTask,
    "mrpc": MrpcTask,
    "mathinstruct": MathInstructTask,
}

__all__ = ["TASKS", "CifarTask", "DigitsTask", "MathInstructTask", "MrpcTask"]

"""What is learnt. ``TASKS`` is the one table from names to classes."""

from typing import Any

from fedecho.core.task import Task
from fedecho.tasks.digits import DigitsTask

TASKS: dict[str, type[Any]] = {"digits": DigitsTask}

__all__ = ["TASKS", "DigitsTask", "Task"]

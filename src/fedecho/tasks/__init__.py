"""The built-in tasks; ``TASKS`` maps their names to classes.

Names are imported on first use, so the light modules of this package (where data files are, downloads) do not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedecho.core.task import Task
    from fedecho.tasks.registry import TASKS, CifarTask, DigitsTask, MathInstructTask, MrpcTask

__all__ = ["TASKS", "CifarTask", "DigitsTask", "MathInstructTask", "MrpcTask", "Task"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedecho.tasks' has no attribute {name!r}")
    from fedecho.core import task
    from fedecho.tasks import registry

    return getattr(task if name == "Task" else registry, name)

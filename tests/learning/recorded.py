"""What a CUDA graph does, on a CPU: the operations of the captured run are made again on the same tensors, and Python is not asked.

A stream that runs the Python again at every replay cannot show what a capture has frozen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedecho.gpu.streams import WARM_UPS, Graph, ImmediateStream


class Recorded(TorchDispatchMode):
    """Notes every operation; replayed, each result goes where it went."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.operations:
                again = func(*args, **kwargs)
                if all(returned.alias_info is None for returned in func._schema.returns):
                    for new, held in zip(tree_leaves(again), tree_leaves(result), strict=True):
                        if isinstance(held, Tensor) and new.data_ptr() != held.data_ptr():
                            held.detach().copy_(new)


class RecordingStream(ImmediateStream):
    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        for _ in range(WARM_UPS):
            work()
        with Recorded() as recorded:
            work()
        return recorded

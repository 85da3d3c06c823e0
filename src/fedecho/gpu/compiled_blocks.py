"""The repeated layers of a network (a transformer's blocks), compiled: one program serves all of them.

To compile a whole model takes the longer the deeper it is; its blocks are the same program with other weights.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of the list that holds most parameters, of those with several layers of one class; empty if there is none."""
    lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList) and _repeats(part)]
    return max(lists, key=lambda layers: sum(map(_size, layers)), default=[])


def _repeats(layers: nn.ModuleList) -> bool:
    """A list of lists is none: those are never called."""
    return len(layers) > 1 and len({type(layer) for layer in layers}) == 1 and not isinstance(layers[0], nn.ModuleList)


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


class CompiledBlocks:
    """Blocks that run compiled inside ``at_work`` and as they are elsewhere, where other shapes and modes would compile anew."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self._calls: list[Any] = [torch.compile(block._call_impl, dynamic=True) for block in blocks]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        # What ``nn.Module.compile`` sets, and what calling a module looks at first.
        before = [block._compiled_call_impl for block in self.blocks]
        for block, call in zip(self.blocks, self._calls, strict=True):
            block._compiled_call_impl = call
        try:
            with warnings.catch_warnings():
                # The compiler looks at the .grad of what goes from block to block, and torch warns of that; and it asks whoever
                # meets a long softmax to tell torch's developers.
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")
                yield
        finally:
            for block, call in zip(self.blocks, before, strict=True):
                block._compiled_call_impl = call

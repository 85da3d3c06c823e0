"""Compile a network's repeated layers (a transformer's blocks) as one program.

Compiling a whole model takes longer the deeper it is, but its blocks are the same program with different weights.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the largest ``ModuleList`` whose layers are of one class, or an empty list."""
    lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList) and _repeats(part)]
    return max(lists, key=lambda layers: sum(map(_size, layers)), default=[])


def _repeats(layers: nn.ModuleList) -> bool:
    """Whether a list holds several layers of one class; nested lists do not count because they are never called."""
    return len(layers) > 1 and len({type(layer) for layer in layers}) == 1 and not isinstance(layers[0], nn.ModuleList)


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


class CompiledBlocks:
    """Blocks that run compiled inside ``enabled`` and eagerly elsewhere, where other shapes and modes would recompile them."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self._calls: list[Any] = [torch.compile(block._call_impl, dynamic=True) for block in blocks]

    @contextmanager
    def enabled(self) -> Iterator[None]:
        # ``nn.Module.compile`` sets this attribute, and calling a module checks it first.
        before = [block._compiled_call_impl for block in self.blocks]
        for block, call in zip(self.blocks, self._calls, strict=True):
            block._compiled_call_impl = call
        try:
            with warnings.catch_warnings():
                # The compiler reads .grad of the activations between blocks, which makes torch warn; for a long softmax it asks
                # users to contact the torch developers.
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")
                yield
        finally:
            for block, call in zip(self.blocks, before, strict=True):
                block._compiled_call_impl = call

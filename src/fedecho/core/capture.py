"""What a task must offer so that its training can be captured as a CUDA graph, and the pieces that a capture is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedecho.core.layout import Layout
from fedecho.core.types import Weights


@runtime_checkable
class Capturable(Protocol):
    """A task whose batches are made on the device from numbers: rows of resident data and draws for their augmentation."""

    def on(self, device: str) -> Any: ...

    def rows_of(self, client: int) -> Tensor: ...

    def draw(self, num: int, generator: torch.Generator) -> Tensor: ...

    def pick(self, rows: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]: ...

    def row_losses(self, logits: Tensor, labels: Tensor) -> Tensor: ...

    def unlabeled_images(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Precision:
    """The type that convolutions compute in, and whether the same bytes must come out twice."""

    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    compiled: bool = True


class DeviceWeights:
    """A model at fixed addresses on the device: fp32 master vectors, and low-precision copies for the layers that compute in them.

    Norm layers read their parameters from the master; everything with two or more dimensions from the copy.
    """

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
        self.params = torch.zeros(layout.num_params, device=device)
        self.buffers = torch.zeros(layout.num_buffers, device=device)
        self.low = self.params if dtype == torch.float32 else torch.zeros(layout.num_params, device=device, dtype=dtype)
        self.named: dict[str, Tensor] = {}
        for part in layout.params:
            wide = len(part.shape) >= 2 or part.name.startswith("head")
            self.named[part.name] = part.view(self.low if wide else self.params).requires_grad_()
        self.named_buffers = {part.name: part.view(self.buffers) for part in layout.buffers}

    def load(self, weights: Weights) -> None:
        self.params.copy_(weights.params)
        self.buffers.copy_(weights.buffers)
        self.refresh()

    def refresh(self) -> None:
        if self.low is not self.params:
            self.low.copy_(self.params)


Forward = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(parameters, buffers, images, row weights) -> logits."""


def forward_of(module: nn.Module, precision: Precision) -> Forward:
    """The module as a function of its tensors: compiled once, it serves every copy of the weights."""
    norms = [name for name, _ in module.named_buffers() if name.endswith("row_weight")]

    def forward(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor, row_weight: Tensor) -> Tensor:
        tensors = {**params, **buffers, **dict.fromkeys(norms, row_weight)}
        logits: Tensor = functional_call(module, tensors, (images.to(precision.dtype),))
        return logits.float()

    return torch.compile(forward, dynamic=False) if precision.compiled else forward


def captured(work: Callable[[], None], stream: torch.cuda.Stream, warm_ups: int = 3) -> torch.cuda.CUDAGraph:
    """``work`` as a graph on ``stream``. It is run a few times first: what it changes must be loaded anew before it counts."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def gather_grads(into: Tensor, layout: Layout, grads: Sequence[Tensor]) -> None:
    """The gradients of all parts into one flat vector, in one kernel."""
    torch._foreach_copy_([part.view(into) for part in layout.params], list(grads))

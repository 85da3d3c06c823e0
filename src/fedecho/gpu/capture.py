"""What a task must offer so that its training can be captured as a CUDA graph, and the pieces that a capture is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedecho.core.layout import Layout, Part
from fedecho.core.types import Weights
from fedecho.learning.descent import rule_of
from fedecho.learning.local import LocalTraining

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class Capturable(Protocol):
    """A task whose batches are made on the device from numbers: rows of resident data and draws for their augmentation."""

    def on(self, device: str) -> Any: ...

    def rows_of(self, client: int) -> Tensor:
        """A client's rows of the resident data."""
        ...

    def draw(self, num: int, generator: torch.Generator) -> Tensor:
        """A number for each image that says how it is augmented."""
        ...

    def resident(self) -> tuple[Tensor, ...]:
        """The data on the device, as ``pick`` wants it."""
        ...

    @staticmethod
    def pick(resident: tuple[Tensor, ...], rows: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """(images, labels). A function of tensors alone, so that it can be compiled."""
        ...

    @staticmethod
    def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of every row, a function of tensors alone too."""
        ...

    def unlabeled_images(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Precision:
    """The type that convolutions compute in, and whether the same bytes must come out twice."""

    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    compiled: bool = True

    def compile(self, work: Callable[P, T], *, dynamic: bool = False) -> Callable[P, T]:
        """Compiled, with every memory-bound kernel's block sizes chosen by trying (5 % of a ResNet step), where this may be."""
        if not self.compiled:
            return work
        # What is chosen by the clock may sum in another order next time.
        options: dict[str, Any] = {} if self.deterministic else {"max_autotune_pointwise": True}
        return torch.compile(work, dynamic=dynamic, options=options)


class DeviceWeights:
    """A model at fixed addresses on the device: fp32 master vectors, and a low-precision copy of the matrices and kernels."""

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.num_matrix = layout, layout.num_matrix_params
        self.params = torch.zeros(layout.num_params, device=device)
        self.buffers = torch.zeros(layout.num_buffers, device=device)
        self.masters = (self.params[: self.num_matrix], self.params[self.num_matrix :])
        """The matrices and the vectors of the master."""
        self.low = self.masters[0] if dtype == torch.float32 else self.masters[0].to(dtype)
        self.named: dict[str, Tensor] = {}
        for part in layout.params:
            matrix = part.offset < self.num_matrix
            self.named[part.name] = part.view(self.low if matrix else self.params).requires_grad_()
        self.named_buffers = {part.name: part.view(self.buffers) for part in layout.buffers}
        self.matrices = [self._matrix(part) for part in layout.params if part.offset < self.num_matrix]
        """(where, master, low-precision copy) of each matrix; the copy is the master itself in fp32."""

    def _matrix(self, part: Part) -> tuple[slice, Tensor, Tensor]:
        where = slice(part.offset, part.offset + part.size)
        master = self.params[where]
        return where, master, master if self.low is self.masters[0] else self.low[where]

    def load(self, weights: Weights) -> None:
        self.params.copy_(weights.params)
        self.buffers.copy_(weights.buffers)
        self.refresh()

    def refresh(self) -> None:
        if self.low is not self.masters[0]:
            self.low.copy_(self.masters[0])

    def gradients(self, loss: Tensor) -> tuple[list[Tensor], Tensor]:
        """d loss, flat: of each matrix (low precision), and of all vectors, which are small, in one."""
        grads = torch.autograd.grad(loss, list(self.named.values()))
        flat = [part.flattened(grad) for part, grad in zip(self.layout.params, grads, strict=True)]
        split = len(self.matrices)
        return flat[:split], torch.cat(flat[split:]) if flat[split:] else loss.new_zeros(0)


Forward = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(parameters, buffers, images, row weights) -> logits."""


def forward_of(module: nn.Module, precision: Precision) -> Forward:
    """The module as a function of its tensors: compiled once, it serves every copy of the weights."""
    state = module.state_dict()
    norms = [name for name, _ in module.named_buffers() if name.endswith("row_weight")]

    biases = [
        name for name, _ in module.named_parameters() if name.endswith("bias") and name[:-4] + "running_mean" not in state
    ]

    def forward(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor, row_weight: Tensor) -> Tensor:
        tensors = {**params, **buffers, **dict.fromkeys(norms, row_weight)}
        for name in biases:  # of layers that compute in low precision
            tensors[name] = tensors[name].to(precision.dtype)
        logits: Tensor = functional_call(module, tensors, (images.to(precision.dtype),))
        return logits.float()

    return precision.compile(forward)


@cache
def compiled_update(local: LocalTraining, precision: Precision) -> Callable[..., None]:
    """The step of these settings on any stretch of the flat vectors: compiled, one pass over memory.

    The gradient may be of low precision and lie anywhere; it is not changed. ``low``, a copy of ``params`` in low precision, is
    kept up; where there is none it is ``params`` itself. ``raw`` is the sum of all gradients, or None.
    """
    rule = rule_of(local)

    def update(params: Tensor, low: Tensor, grads: Tensor, raw: Tensor | None, *others: Tensor | None) -> None:
        grads = grads.to(torch.float32, copy=True)
        if raw is not None:
            raw.add_(grads)
        rule(local, params, grads, *others)
        if low is not params:
            low.copy_(params)

    return precision.compile(update, dynamic=True)

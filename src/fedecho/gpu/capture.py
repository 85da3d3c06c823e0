"""The protocol of tasks whose training can be captured as a CUDA graph, and the building blocks of a capture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedecho.core.layout import Layout, Part
from fedecho.core.types import Weights
from fedecho.learning.descent import step_function
from fedecho.learning.local import LocalTraining

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class Capturable(Protocol):
    """A task that builds its batches on the device from row numbers of resident data and augmentation draws."""

    def on(self, device: str) -> Any: ...

    def rows_of(self, client: int) -> Tensor:
        """Return the client's rows of the resident data."""
        ...

    def draw(self, num: int, generator: torch.Generator) -> Tensor:
        """Draw one number per image that determines its augmentation."""
        ...

    def resident(self) -> tuple[Tensor, ...]:
        """Return the data on the device, in the form that ``pick`` expects."""
        ...

    @staticmethod
    def pick(resident: tuple[Tensor, ...], rows: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images, labels). Must depend only on its tensor arguments, so that it can be compiled."""
        ...

    @staticmethod
    def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of every row. Must depend only on its tensor arguments."""
        ...

    def unlabeled_images(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Precision:
    """The dtype of convolutions, and whether repeated runs must be bit-identical."""

    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    compiled: bool = True

    def compile(self, work: Callable[P, T], *, dynamic: bool = False) -> Callable[P, T]:
        """Compile a function if enabled; autotune block sizes unless deterministic (saves 5 % of a ResNet step)."""
        if not self.compiled:
            return work
        # Autotuning picks by timing, so the order of summation could differ between runs.
        options: dict[str, Any] = {} if self.deterministic else {"max_autotune_pointwise": True}
        return torch.compile(work, dynamic=dynamic, options=options)


class DeviceWeights:
    """A model at fixed addresses on the device: fp32 master vectors and a low-precision copy of matrices and kernels."""

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.num_matrix = layout, layout.num_matrix_params
        self.params = torch.zeros(layout.num_params, device=device)
        self.buffers = torch.zeros(layout.num_buffers, device=device)
        self.masters = (self.params[: self.num_matrix], self.params[self.num_matrix :])
        """The matrix part and the vector part of ``params``."""
        self.low = self.masters[0] if dtype == torch.float32 else self.masters[0].to(dtype)
        self.named: dict[str, Tensor] = {}
        for part in layout.params:
            matrix = part.offset < self.num_matrix
            self.named[part.name] = part.view(self.low if matrix else self.params).requires_grad_()
        self.named_buffers = {part.name: part.view(self.buffers) for part in layout.buffers}
        self.matrices = [self._matrix(part) for part in layout.params if part.offset < self.num_matrix]
        """(slice, master, low-precision copy) of each matrix; in fp32 the copy is the master itself."""

    def _matrix(self, part: Part) -> tuple[slice, Tensor, Tensor]:
        span = slice(part.offset, part.offset + part.size)
        master = self.params[span]
        return span, master, master if self.low is self.masters[0] else self.low[span]

    def load(self, weights: Weights) -> None:
        self.params.copy_(weights.params)
        self.buffers.copy_(weights.buffers)
        self.refresh()

    def refresh(self) -> None:
        """Update the low-precision copy from the masters."""
        if self.low is not self.masters[0]:
            self.low.copy_(self.masters[0])

    def gradients(self, loss: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return flat gradients: one per matrix (low precision), and one for all vectors together, which are small."""
        grads = torch.autograd.grad(loss, list(self.named.values()))
        flat = [part.flattened(grad) for part, grad in zip(self.layout.params, grads, strict=True)]
        split = len(self.matrices)
        return flat[:split], torch.cat(flat[split:]) if flat[split:] else loss.new_zeros(0)


Forward = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(parameters, buffers, images, row weights) -> logits."""


def forward_of(module: nn.Module, precision: Precision) -> Forward:
    """Turn the module into a function of its tensors, compiled once for all copies of the weights."""
    state = module.state_dict()
    norms = [name for name, _ in module.named_buffers() if name.endswith("row_weight")]

    biases = [
        name for name, _ in module.named_parameters() if name.endswith("bias") and name[:-4] + "running_mean" not in state
    ]

    def forward(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor, row_weight: Tensor) -> Tensor:
        tensors = {**params, **buffers, **dict.fromkeys(norms, row_weight)}
        for name in biases:  # biases of layers that compute in low precision
            tensors[name] = tensors[name].to(precision.dtype)
        logits: Tensor = functional_call(module, tensors, (images.to(precision.dtype),))
        return logits.float()

    return precision.compile(forward)


@cache
def compiled_update(local: LocalTraining, precision: Precision) -> Callable[..., None]:
    """Compile the optimizer step for any segment of the flat vectors; it makes one pass over memory.

    The gradient may have low precision and is not modified. ``low`` is the low-precision copy of ``params``, which the step
    updates too, or ``params`` itself if there is no copy. ``raw`` accumulates all gradients, or is None.
    """
    rule = step_function(local)

    def update(params: Tensor, low: Tensor, grads: Tensor, raw: Tensor | None, *others: Tensor | None) -> None:
        grads = grads.to(torch.float32, copy=True)
        if raw is not None:
            raw.add_(grads)
        rule(local, params, grads, *others)
        if low is not params:
            low.copy_(params)

    return precision.compile(update, dynamic=True)

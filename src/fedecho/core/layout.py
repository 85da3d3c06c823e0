"""``Layout``: the only code that maps names and shapes to positions in a flat vector."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from fedecho.core.modules import FullState, copy_module
from fedecho.core.types import Weights

VECTOR = 16
"""Below this many input channels, oneDNN's strided 1x1 convolutions write past their workspace on CPUs with AVX2."""


class StridedPointwise(nn.Module):
    """Replaces a narrow strided 1x1 ``nn.Conv2d`` under the same names. It selects the pixels first; the sums are the same."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.stride, self.groups = like.stride, like.groups

    def forward(self, x: Tensor) -> Tensor:
        down, across = self.stride
        return conv2d(x[..., ::down, ::across], self.weight, self.bias, groups=self.groups)


def replace_narrow(module: nn.Module) -> nn.Module:
    """Replace every narrow strided 1x1 convolution in place, but no subclasses of ``nn.Conv2d``. Return the module."""
    if type(module) is nn.Conv2d and _is_narrow(module):
        return StridedPointwise(module)
    for name, child in module.named_children():
        setattr(module, name, replace_narrow(child))
    return module


def _is_narrow(conv: nn.Conv2d) -> bool:
    pointwise = conv.kernel_size == (1, 1) and conv.padding in ((0, 0), "valid")
    return pointwise and conv.stride != (1, 1) and conv.in_channels // conv.groups < VECTOR


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory format for each number of dimensions."""


@dataclass(frozen=True, slots=True)
class Part:
    """One named tensor inside a flat vector, in the memory format of the module's own tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int
    channels_last: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        piece = flat[self.offset : self.offset + self.size]
        if not self.channels_last:
            return piece.view(self.shape)
        out_channels, in_channels, *spatial = self.shape
        return piece.view(out_channels, *spatial, in_channels).movedim(-1, 1)

    def flattened(self, tensor: Tensor) -> Tensor:
        """Flatten a tensor of this shape in the order of the vector, as a view where its memory already has that order."""
        return (tensor.movedim(1, -1) if self.channels_last else tensor).reshape(-1)


def _parts(named: Iterable[tuple[str, Tensor]]) -> Iterator[Part]:
    offset = 0
    for name, tensor in named:
        yield Part(name, tuple(tensor.shape), offset, _is_channels_last(tensor))
        offset += tensor.numel()


def _is_channels_last(tensor: Tensor) -> bool:
    """Compare strides: with one channel or one pixel, ``is_contiguous`` is true for both memory formats."""
    if tensor.ndim not in CHANNELS_LAST:
        return False
    like = torch.empty(tensor.shape, device="meta", memory_format=CHANNELS_LAST[tensor.ndim])
    return tensor.stride() == like.stride()


def _state_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the floating-point buffers of the state dict. Integer batch counters are not statistics."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
            raise ValueError(
                f"{name}: BatchNorm with momentum=None depends on a batch counter that cannot be averaged: set a momentum"
            )
    saved = module.state_dict(keep_vars=True)
    return [(name, b) for name, b in module.named_buffers() if name in saved and b.is_floating_point()]


@dataclass(frozen=True)
class Layout:
    """The position of each trainable parameter and each running statistic in the two vectors of a ``Weights``."""

    params: tuple[Part, ...]
    buffers: tuple[Part, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """Lay out a module: matrices and kernels first, then vectors (norms, biases), so each kind is one slice of ``params``."""
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        trainable.sort(key=lambda named: named[1].ndim < 2)
        return cls(tuple(_parts(trainable)), tuple(_parts(_state_buffers(module))))

    @classmethod
    def of_tensors(cls, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> "Layout":
        """Lay out a model given only by named tensors, in their order."""
        return cls(tuple(_parts(params.items())), tuple(_parts(buffers.items())))

    @cached_property
    def num_params(self) -> int:
        return sum(part.size for part in self.params)

    @cached_property
    def num_matrix_params(self) -> int:
        """The number of parameters in matrices and kernels, which come first."""
        return sum(part.size for part in self.params if len(part.shape) >= 2)

    @cached_property
    def num_buffers(self) -> int:
        return sum(part.size for part in self.buffers)

    def variances(self, device: torch.device | str = "cpu") -> Tensor:
        """Return a mask of the buffers that are variances (named ``running_var``), which are never negative."""
        mask = torch.zeros(self.num_buffers, dtype=torch.bool, device=device)
        for part in self.buffers:
            part.view(mask).fill_(part.name.endswith("running_var"))
        return mask

    def pack(self, module: nn.Module) -> Weights:
        """Copy the module's weights into new vectors."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return self.flatten({part.name: tensors[part.name].detach() for part in (*self.params, *self.buffers)})

    def flatten(self, named: Mapping[str, Tensor]) -> Weights:
        """Copy named tensors into new vectors. Raise if a name is missing or a shape is wrong."""
        return Weights(_filled(self.params, self.num_params, named), _filled(self.buffers, self.num_buffers, named))

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """Return contiguous copies by name, as files and Flower expect them."""
        plain = torch.contiguous_format
        of_params = {p.name: p.view(weights.params).clone(memory_format=plain) for p in self.params}
        return of_params | {p.name: p.view(weights.buffers).clone(memory_format=plain) for p in self.buffers}

    def bind(self, module: nn.Module, device: torch.device | str = "cpu") -> "BoundNetwork":
        """Copy the module so that its tensors are VIEWS of new vectors: loading a model is one copy, a step one addition."""
        module = copy_module(module).to(device)
        if torch.device(device).type == "cpu":
            module = replace_narrow(module)
        weights = self.pack(module)
        grads = torch.zeros_like(weights.params)
        tensors = dict(module.named_parameters())
        for part in self.params:
            tensors[part.name].data = part.view(weights.params)
            tensors[part.name].grad = part.view(grads)
        for part in self.buffers:
            owner, _, leaf = part.name.rpartition(".")
            module.get_submodule(owner)._buffers[leaf] = part.view(weights.buffers)
        return BoundNetwork(module, self, weights, grads, FullState.of(module, self))


def _filled(parts: tuple[Part, ...], size: int, named: Mapping[str, Tensor]) -> Tensor:
    device = next(iter(named.values())).device if named else torch.device("cpu")
    flat = torch.zeros(size, device=device)
    for part in parts:
        if part.name not in named:
            raise ValueError(f"the weights lack {part.name!r}")
        tensor = named[part.name]
        if tuple(tensor.shape) != part.shape:
            raise ValueError(f"{part.name!r} must have shape {part.shape}, got {tuple(tensor.shape)}")
        part.view(flat).copy_(tensor)
    return flat


@dataclass(frozen=True, slots=True)
class BoundNetwork:
    """A module whose tensors are views of flat vectors. Autograd accumulates into ``grads``; clear it after each step."""

    module: nn.Module
    layout: Layout
    weights: Weights
    grads: Tensor
    full_state: FullState
    """The full state dict of the module, including tensors outside the vectors as they were when it was bound."""

    def load(self, weights: Weights) -> None:
        self.weights.params.copy_(weights.params)
        self.weights.buffers.copy_(weights.buffers)

"""``Layout``: the only code that knows the names and shapes inside a flat vector."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from fedecho.core.narrow import without_narrow
from fedecho.core.types import Weights


@dataclass(frozen=True, slots=True)
class Part:
    """One named tensor inside a flat vector. Convolution weights lie channels-last."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        piece = flat[self.offset : self.offset + self.size]
        if len(self.shape) != 4:
            return piece.view(self.shape)
        out, into, height, width = self.shape
        return piece.view(out, height, width, into).permute(0, 3, 1, 2)


def _parts(named: Iterable[tuple[str, Tensor]]) -> Iterator[Part]:
    offset = 0
    for name, tensor in named:
        yield Part(name, tuple(tensor.shape), offset)
        offset += tensor.numel()


def _state_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Floating-point buffers that belong to the saved state; counters of batches are no statistics."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
            raise ValueError(
                f"{name}: BatchNorm with momentum=None depends on a counter that federated averaging cannot merge: set one"
            )
    saved = module.state_dict(keep_vars=True)
    return [(name, b) for name, b in module.named_buffers() if name in saved and b.is_floating_point()]


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter and each running statistic lies in the two vectors of a ``Weights``."""

    params: tuple[Part, ...]
    buffers: tuple[Part, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """Matrices and kernels come first, vectors (norms, biases) after them: each kind is then one slice of ``params``."""
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        trainable.sort(key=lambda named: named[1].ndim < 2)
        return cls(tuple(_parts(trainable)), tuple(_parts(_state_buffers(module))))

    @classmethod
    def of_tensors(cls, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> "Layout":
        """For a model that is known by its named tensors alone; their order is kept."""
        return cls(tuple(_parts(params.items())), tuple(_parts(buffers.items())))

    @cached_property
    def num_params(self) -> int:
        return sum(part.size for part in self.params)

    @cached_property
    def num_matrix_params(self) -> int:
        """How many of the params lie in matrices and kernels, which come first."""
        return sum(part.size for part in self.params if len(part.shape) >= 2)

    @cached_property
    def num_buffers(self) -> int:
        return sum(part.size for part in self.buffers)

    def pack(self, module: nn.Module) -> Weights:
        """The module's weights as fresh vectors."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return self.flatten({part.name: tensors[part.name].detach() for part in (*self.params, *self.buffers)})

    def flatten(self, named: Mapping[str, Tensor]) -> Weights:
        """Vectors from named tensors; a missing name or a wrong shape is an error that says which."""
        return Weights(_filled(self.params, self.num_params, named), _filled(self.buffers, self.num_buffers, named))

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """Contiguous copies under their names, as files and Flower want them."""
        plain = torch.contiguous_format
        of_params = {p.name: p.view(weights.params).clone(memory_format=plain) for p in self.params}
        return of_params | {p.name: p.view(weights.buffers).clone(memory_format=plain) for p in self.buffers}

    def bind(self, module: nn.Module, device: torch.device | str = "cpu") -> "BoundNetwork":
        """Make the module's tensors VIEWS of new vectors: loading a model is then one copy, a step one addition."""
        module.to(device)
        if torch.device(device).type == "cpu":
            module = without_narrow(module)
        weights = self.pack(module)
        grads = torch.zeros_like(weights.params)
        tensors = dict(module.named_parameters())
        for part in self.params:
            tensors[part.name].data = part.view(weights.params)
            tensors[part.name].grad = part.view(grads)
        for part in self.buffers:
            owner, _, leaf = part.name.rpartition(".")
            module.get_submodule(owner)._buffers[leaf] = part.view(weights.buffers)
        return BoundNetwork(module, self, weights, grads)


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
    """A module that lives inside flat vectors. Autograd adds into ``grads``; whoever steps must clear it."""

    module: nn.Module
    layout: Layout
    weights: Weights
    grads: Tensor

    def load(self, weights: Weights) -> None:
        self.weights.params.copy_(weights.params)
        self.weights.buffers.copy_(weights.buffers)

"""Low-precision copies of linear layers' weights, and gradients concatenated into flat segments."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedecho.core.layout import BoundNetwork, Part

LARGE = 1 << 14
"""Concatenating larger gradients costs more than a separate kernel for each."""
ALIGNED = 8
"""Alignment of a segment: 16 bytes of 2-byte numbers. Compiled code assumes it (torch 2.6 loses unaligned writes)."""


@dataclass(frozen=True)
class Segment:
    """Adjacent parts of the flat vectors that one kernel updates."""

    parts: tuple[Part, ...]

    @property
    def span(self) -> slice:
        return slice(self.parts[0].offset, self.parts[-1].offset + self.parts[-1].size)

    def gradient(self, grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Flatten the parts' gradients (None means zero): float32 for several parts, the original dtype for one."""
        flat = [
            like.new_zeros(part.size) if grad is None else part.flattened(grad)
            for part, grad in zip(self.parts, grads, strict=True)
        ]
        return flat[0] if len(flat) == 1 else joined(flat)


def joined(flat: list[Tensor]) -> Tensor:
    """Concatenate gradients in float32. Low-precision ones are cast together, in one kernel instead of one each."""
    low = [number for number, grad in enumerate(flat) if grad.dtype != torch.float32]
    if low:
        together = torch.cat([flat[number] for number in low]).float()
        for number, grad in zip(low, together.split([len(flat[number]) for number in low]), strict=True):
            flat[number] = grad
    return torch.cat(flat)


def segments_of(parts: Iterable[Part]) -> list[Segment]:
    """Group parts, in order, into segments that start aligned; parts that do not are grouped with their neighbours."""
    groups: list[list[Part]] = []
    last_alone = True
    for part in parts:
        alone = part.size >= LARGE and part.offset % ALIGNED == 0 and part.size % ALIGNED == 0
        if alone or last_alone:
            groups.append([part])
        else:
            groups[-1].append(part)
        last_alone = alone
    return [Segment(tuple(group)) for group in groups]


INSPECTIONS: frozenset[Any] = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point}
    | {getattr(Tensor, name).__get__ for name in ("shape", "device", "requires_grad", "ndim", "is_cuda", "layout")}
)
"""Functions that only inspect a weight; a copy gives the same answer."""
CAST = "ToCopyBackward0"
"""Autograd's name for the backward of a cast."""


@dataclass(frozen=True)
class LinearParam:
    """A plain trained parameter of a plain linear layer."""

    layer: nn.Linear
    name: str
    part: Part
    master: nn.Parameter

    def set(self, param: nn.Parameter) -> None:
        self.layer._parameters[self.name] = param


def linear_params(network: BoundNetwork) -> list[LinearParam]:
    module = network.module
    parts = {module.get_parameter(part.name): part for part in network.layout.params}
    return [
        LinearParam(layer, name, parts[param], param)
        for layer in module.modules()
        if type(layer) is nn.Linear
        for name, param in layer.named_parameters(recurse=False)
        # Autocast's own copy is aligned; products with an unaligned one may use other kernels.
        if param in parts and _is_plain(param) and parts[param].offset % ALIGNED == 0
    ]


def _is_plain(param: nn.Parameter) -> bool:
    """Whether a copy would be equivalent: no hooks, no attributes, no subclass."""
    return type(param) is nn.Parameter and not (vars(param) or param._backward_hooks or param._post_accumulate_grad_hooks)


def gradient_sources(loss: Tensor) -> dict[int, list[str]]:
    """Return the autograd operations that pass a gradient to each leaf, by the leaf's id."""
    sources: dict[int, list[str]] = {}
    seen, pending = set[Any](), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if (leaf := getattr(following, "variable", None)) is not None:
                sources.setdefault(id(leaf), []).append(node.name())
            pending.append(following)
    return sources


class CastRecorder(TorchFunctionMode):
    """Records, during a forward pass, which parameters are used exactly once: by one linear layer under autocast."""

    def __init__(self, params: Collection[Tensor], device: torch.device) -> None:
        super().__init__()
        self._watched, self._device = {id(param) for param in params}, device.type
        self._casts: dict[int, list[torch.dtype | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in INSPECTIONS:
            used = [*args[1:], kwargs.get("weight"), kwargs.get("bias")] if func is linear else []
            # Used in any other way, it is not cast, or not only once if it is a layer's input.
            other = Counter(id(leaf) for leaf in tree_leaves((args, kwargs))) - Counter(map(id, used))
            for leaf in map(id, used):
                self._note(leaf, self._precision())
            for leaf in other:
                self._note(leaf, None)
        return func(*args, **kwargs)

    def _note(self, leaf: int, dtype: torch.dtype | None) -> None:
        if leaf in self._watched:
            self._casts.setdefault(leaf, []).append(dtype)

    def _precision(self) -> torch.dtype | None:
        return torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None

    def cast_once(self, param: Tensor) -> torch.dtype | None:
        """Return the dtype autocast cast it to if that was its only recorded use."""
        casts = self._casts.get(id(param), [])
        return casts[0] if len(casts) == 1 else None


def single_casts(
    params: Collection[LinearParam], device: torch.device, forward: Callable[[], Tensor]
) -> dict[str, torch.dtype]:
    """Return the parameters used only through one autocast of a linear layer, with the dtype of the cast.

    Uses that Python does not see (functions with a custom backward) show in autograd: the cast must be the only gradient source.
    """
    recorder = CastRecorder([param.master for param in params], device)
    with recorder:
        sources = gradient_sources(forward())
    once = {param: recorder.cast_once(param.master) for param in params if sources.get(id(param.master)) == [CAST]}
    return {param.part.name: dtype for param, dtype in once.items() if dtype is not None}


class LowPrecisionCopies:
    """Low-precision copies of a network's parameters in one vector, and the layers that can use them."""

    def __init__(self, network: BoundNetwork, params: Collection[LinearParam], dtype: torch.dtype) -> None:
        self._params = network.weights.params
        self.low = self._params.to(dtype)
        self._copies = {param.part.name: nn.Parameter(param.part.view(self.low)) for param in params}
        self._linear_params = params

    def refresh(self) -> None:
        self.low.copy_(self._params)

    def has_copy_of(self, parts: Collection[Part]) -> bool:
        """Whether any of the parts has a copy."""
        return any(part.name in self._copies for part in parts)

    def receiving_gradients(self, names: Collection[str], forward: Callable[[], Tensor]) -> list[str]:
        """Return the names whose copies receive the gradient; code that kept a reference to a parameter still uses the original."""
        with self.swapped_in(names):
            sources = gradient_sources(forward())
        return [name for name in names if len(sources.get(id(self._copies[name]), [])) == 1]

    @contextmanager
    def swapped_in(self, names: Collection[str]) -> Iterator[None]:
        """Make the layers use the copies of these parameters."""
        swapped = [param for param in self._linear_params if param.part.name in names]
        for param in swapped:
            param.set(self._copies[param.part.name])
        try:
            yield
        finally:
            for param in swapped:
                param.set(param.master)

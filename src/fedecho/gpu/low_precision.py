"""Linear layers with low-precision copies of their weights, and gradients gathered in flat segments."""

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
"""To join gradients that are larger costs more than a kernel of their own."""
ALIGNED = 8
"""Where a stretch may begin: 16 bytes of the shortest numbers. Compiled code assumes no less (torch 2.6 loses what it writes)."""


@dataclass(frozen=True)
class Stretch:
    """Neighbours in the flat vectors that one kernel updates."""

    parts: tuple[Part, ...]

    @property
    def span(self) -> slice:
        return slice(self.parts[0].offset, self.parts[-1].offset + self.parts[-1].size)

    def gradient(self, found: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Flat, from the gradients of the parts; None is zero. Of several parts it is float32, of one what it was."""
        flat = [
            like.new_zeros(part.size) if grad is None else part.flattened(grad)
            for part, grad in zip(self.parts, found, strict=True)
        ]
        return flat[0] if len(flat) == 1 else joined(flat)


def joined(flat: list[Tensor]) -> Tensor:
    """All in one, in float32. Those of low precision are cast together: one by one they would be a kernel each."""
    low = [number for number, grad in enumerate(flat) if grad.dtype != torch.float32]
    if low:
        together = torch.cat([flat[number] for number in low]).float()
        for number, grad in zip(low, together.split([len(flat[number]) for number in low]), strict=True):
            flat[number] = grad
    return torch.cat(flat)


def stretches(parts: Iterable[Part]) -> list[Stretch]:
    """All parts in their order. Every stretch begins aligned: what begins or ends elsewhere is joined with its neighbours."""
    found: list[list[Part]] = []
    last_alone = True
    for part in parts:
        alone = part.size >= LARGE and part.offset % ALIGNED == 0 and part.size % ALIGNED == 0
        if alone or last_alone:
            found.append([part])
        else:
            found[-1].append(part)
        last_alone = alone
    return [Stretch(tuple(run)) for run in found]


LOOKS: frozenset[Any] = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point}
    | {getattr(Tensor, name).__get__ for name in ("shape", "device", "requires_grad", "ndim", "is_cuda", "layout")}
)
"""What may be asked of a weight besides: a copy answers the same."""
CAST = "ToCopyBackward0"
"""Autograd's name for the way back from a cast."""


@dataclass(frozen=True)
class Place:
    """A trained parameter, and no more than that, of a plain linear layer."""

    layer: nn.Linear
    name: str
    part: Part
    master: nn.Parameter

    def hold(self, param: nn.Parameter) -> None:
        self.layer._parameters[self.name] = param


def places_of(network: BoundNetwork) -> list[Place]:
    module = network.module
    parts = {module.get_parameter(part.name): part for part in network.layout.params}
    return [
        Place(layer, name, parts[param], param)
        for layer in module.modules()
        if type(layer) is nn.Linear
        for name, param in layer.named_parameters(recurse=False)
        # Autocast's own copy is aligned: products with one that is not may be other kernels'.
        if param in parts and _is_plain(param) and parts[param].offset % ALIGNED == 0
    ]


def _is_plain(param: nn.Parameter) -> bool:
    """Hooks, attributes and a class of its own would be missing in a copy."""
    return type(param) is nn.Parameter and not (vars(param) or param._backward_hooks or param._post_accumulate_grad_hooks)


def takers_of(loss: Tensor) -> dict[int, list[str]]:
    """Who hands a gradient to each leaf, by the leaf's id: autograd's names of the operations."""
    found: dict[int, list[str]] = {}
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if (leaf := getattr(following, "variable", None)) is not None:
                found.setdefault(id(leaf), []).append(node.name())
            left.append(following)
    return found


class Uses(TorchFunctionMode):
    """Watches a forward pass: which parameters does one linear layer take, once, under autocast, and nobody else?"""

    def __init__(self, params: Collection[Tensor], device: torch.device) -> None:
        super().__init__()
        self._watched, self._device = {id(param) for param in params}, device.type
        self._casts: dict[int, list[torch.dtype | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LOOKS:
            taken = [*args[1:], kwargs.get("weight"), kwargs.get("bias")] if func is linear else []
            # As something else it is neither cast nor, if it is a layer's input, cast once.
            other = Counter(id(leaf) for leaf in tree_leaves((args, kwargs))) - Counter(map(id, taken))
            for leaf in map(id, taken):
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
        """What autocast cast it to, if that and nothing more was seen to be done with it."""
        casts = self._casts.get(id(param), [])
        return casts[0] if len(casts) == 1 else None


def casts_of(places: Collection[Place], device: torch.device, forward: Callable[[], Tensor]) -> dict[str, torch.dtype]:
    """The parameters that autocast casts for one layer, and nobody takes otherwise, and to what. What Python does not see of a
    loss (functions with a backward of their own) autograd does: it must get the gradient of the cast, and of nothing else."""
    uses = Uses([place.master for place in places], device)
    with uses:
        takers = takers_of(forward())
    once = {place: uses.cast_once(place.master) for place in places if takers.get(id(place.master)) == [CAST]}
    return {place.part.name: dtype for place, dtype in once.items() if dtype is not None}


class Lowered:
    """Low copies of a network's parameters, in one vector, and the layers that may hold them."""

    def __init__(self, network: BoundNetwork, places: Collection[Place], dtype: torch.dtype) -> None:
        self._params = network.weights.params
        self.low = self._params.to(dtype)
        self._copies = {place.part.name: nn.Parameter(place.part.view(self.low)) for place in places}
        self._places = places

    def refresh(self) -> None:
        self.low.copy_(self._params)

    def keeps(self, parts: Collection[Part]) -> bool:
        """May a layer hold a copy of any of them?"""
        return any(part.name in self._copies for part in parts)

    def taken(self, names: Collection[str], forward: Callable[[], Tensor]) -> list[str]:
        """Those whose copies take the gradient: who has kept a parameter, and does not ask its layer, goes on to use that one."""
        with self.in_place(names):
            takers = takers_of(forward())
        return [name for name in names if len(takers.get(id(self._copies[name]), [])) == 1]

    @contextmanager
    def in_place(self, names: Collection[str]) -> Iterator[None]:
        """The layers hold the copies of these parameters."""
        swapped = [place for place in self._places if place.part.name in names]
        for place in swapped:
            place.hold(self._copies[place.part.name])
        try:
            yield
        finally:
            for place in swapped:
                place.hold(place.master)

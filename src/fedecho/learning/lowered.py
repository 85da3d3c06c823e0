"""Linear layers that autocast would cast: their weights are cast together, and so are their gradients.

Autocast casts each weight in its layer, and each gradient back behind it: of a BERT three hundred small kernels a step, and
every gradient passes through memory twice more. Here low copies are the leaves. All values have the bits they had.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedecho.core.layout import BoundNetwork, Part

SMALL = 1 << 14
"""Neighbours that together have fewer numbers than this (biases between norms) are gathered from where they lie."""


@dataclass(frozen=True)
class Place:
    """A trained parameter of a linear layer, and where it lies in the flat vectors."""

    layer: nn.Linear
    name: str
    master: nn.Parameter
    part: Part

    @property
    def span(self) -> slice:
        return slice(self.part.offset, self.part.offset + self.part.size)


class Group:
    """Some parameters' copies in low precision, one vector, whose pieces take the parameters' places."""

    def __init__(self, places: Sequence[Place], network: BoundNetwork, dtype: torch.dtype) -> None:
        self.places, self._sizes = places, [place.part.size for place in places]
        spans = [place.span for place in places]
        self._is_one = all(one.stop == other.start for one, other in pairwise(spans))
        if self._is_one:
            spans = [slice(spans[0].start, spans[-1].stop)]
        self._params, self._grads = ([flat[span] for span in spans] for flat in (network.weights.params, network.grads))
        self._low = torch.zeros(sum(self._sizes), dtype=dtype, device=network.grads.device)
        pieces = zip(self._low.split(self._sizes), places, strict=True)
        self.leaves = [piece.view(place.part.shape).requires_grad_() for piece, place in pieces]

    def cast(self) -> None:
        self._low.copy_(self._params[0] if self._is_one else torch.cat(self._params))

    def store(self, found: Sequence[Tensor | None]) -> None:
        """The leaves' gradients to where those of their parameters are kept."""
        whole = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(self.leaves, found, strict=True)]
        low = torch.cat([grad.reshape(-1) for grad in whole])
        if self._is_one:
            self._grads[0].copy_(low)
        else:  # cast first: only then is it one kernel to spread them
            torch._foreach_copy_(self._grads, list(low.float().split(self._sizes)))


class Lowered:
    """The parameters of a network that are swapped for copies while a loss is computed, in few groups."""

    def __init__(self, network: BoundNetwork, places: Sequence[Place] = (), dtype: torch.dtype = torch.bfloat16) -> None:
        runs = _runs(sorted(places, key=lambda place: place.part.offset))
        large = [run for run in runs if _size(run) >= SMALL]
        small = [place for run in runs if _size(run) < SMALL for place in run]
        self.groups = [Group(run, network, dtype) for run in [*large, small] if run]
        self._grads, masters = network.grads, {place.master for place in places}
        self._others = [param for param in network.module.parameters() if param.requires_grad and param not in masters]
        self._leaves = [*(leaf for group in self.groups for leaf in group.leaves), *self._others]

    @classmethod
    def of(cls, network: BoundNetwork, forward: Callable[[], Any]) -> "Lowered":
        """What ``forward``, which is run once, does under autocast decides."""
        module, calls = network.module, _calls(network.module, forward)
        holders = Counter(param for layer in module.modules() for param in layer._parameters.values() if param is not None)
        parts = {module.get_parameter(part.name): part for part in network.layout.params}
        # A second use would add to a gradient in low precision, and what is tied is used elsewhere.
        once = {layer: dtypes[0] for layer, dtypes in calls.items() if len(dtypes) == 1 and dtypes[0] is not None}
        if len(set(once.values())) != 1:
            return cls(network)
        places = [
            Place(layer, name, param, parts[param])
            for layer in once
            for name, param in layer.named_parameters(recurse=False)
            if param in parts and holders[param] == 1
        ]
        return cls(network, places, *set(once.values()))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The layers hold fresh copies."""
        with torch.no_grad():
            for group in self.groups:
                group.cast()
        for group in self.groups:
            _hold(group.places, group.leaves)
        try:
            yield
        finally:
            for group in self.groups:
                _hold(group.places, [place.master for place in group.places])

    def gradients(self, loss: Tensor) -> None:
        """Of all that is trained, into the network's ``grads``: as few kernels as autograd's own sums are many."""
        found = torch.autograd.grad(loss, self._leaves, allow_unused=True)
        if any(grad is None for grad in found):
            self._grads.zero_()
        for group in self.groups:
            group.store(found[: len(group.leaves)])
            found = found[len(group.leaves) :]
        used = [(param.grad, grad) for param, grad in zip(self._others, found, strict=True) if grad is not None]
        if used:
            torch._foreach_copy_([place for place, _ in used if place is not None], [grad for _, grad in used])


def _runs(places: Sequence[Place]) -> list[list[Place]]:
    """Parameters that lie next to each other, together."""
    runs: list[list[Place]] = []
    for place in places:
        if runs and runs[-1][-1].span.stop == place.span.start:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _size(places: Sequence[Place]) -> int:
    return sum(place.part.size for place in places)


def _hold(places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    for place, tensor in zip(places, tensors, strict=True):
        place.layer._parameters[place.name] = tensor  # type: ignore[assignment]


def _calls(module: nn.Module, forward: Callable[[], Any]) -> dict[nn.Linear, list[torch.dtype | None]]:
    """For each plain linear layer, the types that autocast computed its calls in (None: it was off)."""
    calls: dict[nn.Linear, list[torch.dtype | None]] = {}

    def note(layer: nn.Linear, inputs: Any) -> None:
        kind = layer.weight.device.type
        calls.setdefault(layer, []).append(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)

    hooks = [layer.register_forward_pre_hook(note) for layer in module.modules() if type(layer) is nn.Linear]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return calls

"""A model's gradients as the optimizer takes them: each large matrix's where it lies, the small parts' joined."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.core.layout import Part

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

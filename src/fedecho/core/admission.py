"""Who is let in. An update is checked here once, at the border; behind it every algorithm trusts the type."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from fedecho.core.types import ClientUpdate, GlobalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The bounds on an update."""

    max_norm: float | None = None
    """The largest L2 norm of a delta, or no bound."""
    max_examples: int = 1_000_000_000

    def __post_init__(self) -> None:
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"admission.max_norm must be above 0, got {self.max_norm}")
        if self.max_examples < 1:
            raise ValueError(f"admission.max_examples must be at least 1, got {self.max_examples}")

    def fault(self, update: ClientUpdate, base: GlobalModel, norm: float, wants_correction: bool) -> str | None:
        """Why the update is refused, or None. ``norm`` is that of its delta."""
        if not isfinite(norm):
            return "delta is not finite"
        if self.max_norm is not None and norm > self.max_norm:
            return f"delta's norm {norm:.4g} is above the bound {self.max_norm:.4g}"
        if not _finite(update.buffers):
            return "buffers are not finite"
        if wants_correction and update.correction is None:
            return "correction is missing"
        if update.correction is not None and not _finite(update.correction):
            return "correction is not finite"
        if not 1 <= update.num_examples <= self.max_examples:
            return f"num_examples {update.num_examples} is outside 1 to {self.max_examples}"
        if update.num_steps < 1:
            return f"num_steps {update.num_steps} is below 1"
        return None


def misfit(update: ClientUpdate, base: GlobalModel) -> str | None:
    """Tensors of the wrong length or kind, or None. Comes before anything computes with them."""
    wanted = {"delta": (update.delta, base.weights.params), "buffers": (update.buffers, base.weights.buffers)}
    if update.correction is not None:
        wanted["correction"] = (update.correction, base.weights.params)
    for name, (got, like) in wanted.items():
        if got.shape != like.shape:
            return f"{name} has shape {tuple(got.shape)}, not {tuple(like.shape)}"
        if got.dtype != like.dtype:
            return f"{name} has dtype {got.dtype}, not {like.dtype}"
    return None


def norm_of(delta: Tensor) -> float:
    """Not finite if any entry is not: one pass answers both questions."""
    return float(torch.linalg.vector_norm(delta))


def _finite(tensor: Tensor) -> bool:
    return isfinite(norm_of(tensor))

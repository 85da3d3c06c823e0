"""Teachers that a few bad clients cannot turn: coordinate-wise median, trimmed mean, and a mean weighted by certainty."""

from collections.abc import Iterable
from math import log
from typing import Literal

import torch
from torch import Tensor

TeacherRule = Literal["mean", "median", "trimmed", "entropy"]
TINY = torch.finfo(torch.float32).tiny
CHUNK_VALUES = 2**24
"""So many numbers are sorted at once: the clients' logits together may be far larger."""


def robust_teacher(entries: Iterable[Tensor], rule: TeacherRule, trim: float, *, probabilities: bool = False) -> Tensor:
    """The teacher on U from all clients' entries, some rows of U at a time. They are logits, or ``probabilities``.

    What is kept in half precision is combined in float32: in float16 two logits may have no sum, and small weights are zero.
    """
    held = list(entries)
    rows = max(1, CHUNK_VALUES // (len(held) * held[0].shape[-1]))
    chunks = (
        torch.stack([_widened(entry) for entry in part]) for part in zip(*(entry.split(rows) for entry in held), strict=True)
    )
    return torch.cat([_combined(chunk, rule, trim, probabilities) for chunk in chunks])


def _widened(entry: Tensor) -> Tensor:
    return entry.float() if entry.dtype.itemsize < 4 else entry


def _combined(entries: Tensor, rule: TeacherRule, trim: float, probabilities: bool) -> Tensor:
    """[clients, rows, classes] to [rows, classes]."""
    if rule == "entropy":
        return _by_certainty(entries, entries.clamp_min(TINY).log() if probabilities else entries.log_softmax(dim=-1))
    if rule == "median":
        return middle(entries)
    return trimmed_mean(entries, trim)


def middle(values: Tensor) -> Tensor:
    """The median over the first axis; of an even number, the mean of the middle two."""
    ordered, num = values.sort(dim=0).values, len(values)
    return (ordered[(num - 1) // 2] + ordered[num // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean over the first axis without the lowest and the highest ``trim`` of the values."""
    cut = min(int(trim * len(values)), (len(values) - 1) // 2)
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)


def _by_certainty(entries: Tensor, log_probabilities: Tensor) -> Tensor:
    """Each client weighs (1 - H / ln C)^2 on each row: who is unsure there says less."""
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1) / log(max(entries.shape[-1], 2))
    weight = (1 - entropy).clamp_min(1e-6).square()[..., None]
    return (weight * entries).sum(dim=0) / weight.sum(dim=0)

"""Teachers that a few bad clients cannot turn: coordinate-wise median, trimmed mean, and a mean weighted by certainty."""

from collections.abc import Iterable
from math import log
from typing import Literal

import torch
from torch import Tensor

TeacherRule = Literal["mean", "median", "trimmed", "entropy"]
RULES = ("mean", "median", "trimmed", "entropy")
CHUNK_VALUES = 2**24
"""So many numbers are sorted at once: the clients' logits together may be far larger."""


def robust_teacher(entries: Iterable[Tensor], rule: TeacherRule, trim: float) -> Tensor:
    """The teacher on U from all clients' entries, some rows of U at a time."""
    held = list(entries)
    rows = max(1, CHUNK_VALUES // (len(held) * held[0].shape[-1]))
    parts = [_combined(torch.stack(part), rule, trim) for part in zip(*(entry.split(rows) for entry in held), strict=True)]
    return torch.cat(parts)


def _combined(logits: Tensor, rule: TeacherRule, trim: float) -> Tensor:
    """[clients, rows, classes] to [rows, classes]."""
    if rule == "entropy":
        return _by_certainty(logits)
    if rule == "median":
        return middle(logits)
    return trimmed_mean(logits, trim)


def middle(values: Tensor) -> Tensor:
    """The median over the first axis; of an even number, the mean of the middle two."""
    ordered, num = values.sort(dim=0).values, len(values)
    return (ordered[(num - 1) // 2] + ordered[num // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean over the first axis without the lowest and the highest ``trim`` of the values."""
    cut = min(int(trim * len(values)), (len(values) - 1) // 2)
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)


def _by_certainty(logits: Tensor) -> Tensor:
    """Each client weighs (1 - H / ln C)^2 on each row: who is unsure there says less."""
    log_probabilities = logits.log_softmax(dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1) / log(max(logits.shape[-1], 2))
    weight = (1 - entropy).clamp_min(1e-6).square()[..., None]
    return (weight * logits).sum(dim=0) / weight.sum(dim=0)

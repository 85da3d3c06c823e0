"""Steps that a few bad clients cannot turn: how the M updates of a buffer become one."""

from typing import Literal

import torch
from torch import Tensor

from fedecho.distill.robust import middle, trimmed_mean

StepRule = Literal["mean", "clipped", "median", "trimmed", "krum"]
StatisticsRule = Literal["mean", "median"]
"""For methods whose step has no rule but the mean."""


def check_rule(rule: StepRule, weighted: bool) -> None:
    if weighted and rule != "mean":
        raise ValueError(
            f"weighted goes with combine = 'mean', got {rule!r}: a client that may claim any number of examples must not "
            "outweigh a robust rule; set weighted = false"
        )


def combined(deltas: Tensor, statistics: Tensor, rule: StepRule) -> tuple[Tensor, Tensor]:
    """One delta and one set of statistics of [M, ...] each.

    ``clipped``: every delta is cut to the median norm of the buffer, then the mean. ``krum``: the update nearest to its
    neighbours (Blanchard et al., 2017). Statistics have no norm to cut, so their median is taken.
    """
    if rule == "krum":
        chosen = krum(deltas)
        return deltas[chosen], statistics[chosen]
    if rule == "clipped":
        return clipped_mean(deltas), middle(statistics)
    if rule == "median":
        return middle(deltas), middle(statistics)
    return trimmed_mean(deltas, 0.2), trimmed_mean(statistics, 0.2)


def clipped_mean(deltas: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(deltas, dim=1)
    bound = middle(norms)
    factors: Tensor = bound / norms.clamp_min(bound).clamp_min(1e-30)
    return (deltas * factors[:, None]).mean(dim=0)


def krum(deltas: Tensor) -> int:
    """The index of the update whose M - f - 2 nearest others are nearest, with the most attackers f that M can bear."""
    num = len(deltas)
    if num < 3:
        return 0
    attackers = (num - 3) // 2
    distances = torch.cdist(deltas[None], deltas[None], compute_mode="donot_use_mm_for_euclid_dist")[0].square()
    nearest = distances.sort(dim=1).values[:, 1 : num - attackers - 1]  # the first is the update itself
    return int(nearest.sum(dim=1).argmin())

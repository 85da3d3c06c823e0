"""The buffer shared by the buffered methods: staleness weights, the running sum of deltas and robust step rules."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedecho.core.ranges import Factor, at_least
from fedecho.core.types import GlobalModel, Weights
from fedecho.distill.teachers import median, trimmed_mean

Staleness = Callable[[int], float]
StalenessName = Literal["constant", "polynomial", "hinge"]
Power = Annotated[float, at_least(0, most=100)]
Slope = Factor
Grace = Annotated[int, at_least(0)]


def constant(tau: int) -> float:
    return 1.0


def polynomial(power: float) -> Staleness:
    """Return the weight (1 + tau)^-p: for p = 1/2, 1 / sqrt(1 + tau).

    >>> polynomial(0.5)(3)
    0.5
    """
    return lambda tau: float((1 + tau) ** -power)


def hinge(slope: float, grace: int) -> Staleness:
    """Return the weight 1 up to ``grace`` versions, then 1 / (slope (tau - grace) + 1). It is continuous at the hinge.

    >>> hinge(10.0, 4)(4), hinge(10.0, 4)(5)
    (1.0, 0.09090909090909091)
    """
    return lambda tau: 1.0 if tau <= grace else 1.0 / (slope * (tau - grace) + 1.0)


def staleness_weight(name: StalenessName, power: float, slope: float = 10.0, grace: int = 4) -> Staleness:
    match name:
        case "constant":
            return constant
        case "polynomial":
            return polynomial(power)
        case "hinge":
            return hinge(slope, grace)
    raise ValueError(f"staleness must be 'constant', 'polynomial' or 'hinge', got {name!r}")


StepRule = Literal["mean", "clipped", "median", "trimmed", "krum"]
StatisticsRule = Literal["mean", "median"]
"""How BatchNorm statistics are combined in methods that always average the deltas."""


def check_rule(rule: StepRule, weighted: bool) -> None:
    if weighted and rule != "mean":
        raise ValueError(
            f"weighted needs combine = 'mean', got {rule!r}: a client that claims many examples could defeat a robust rule. "
            "Set weighted = false"
        )


def combined(deltas: Tensor, statistics: Tensor, rule: StepRule) -> tuple[Tensor, Tensor]:
    """Combine M deltas and M sets of statistics, [M, ...] each, into one of each.

    ``clipped`` scales every delta down to the median norm of the buffer and averages them; the statistics, which cannot be
    clipped, are combined by their median. ``krum`` selects the update nearest to its neighbours (Blanchard et al., 2017).
    """
    if rule == "krum":
        chosen = krum(deltas)
        return deltas[chosen], statistics[chosen]
    if rule == "clipped":
        return clipped_mean(deltas), median(statistics)
    if rule == "median":
        return median(deltas), median(statistics)
    return trimmed_mean(deltas, 0.2), trimmed_mean(statistics, 0.2)


def clipped_mean(deltas: Tensor) -> Tensor:
    """Return the mean of the deltas after scaling each down to their median norm."""
    norms = torch.linalg.vector_norm(deltas, dim=1)
    bound = median(norms)
    factors: Tensor = bound / norms.clamp_min(bound).clamp_min(1e-30)
    return (deltas * factors[:, None]).mean(dim=0)


def krum(deltas: Tensor) -> int:
    """Return the index of the update with the least distance to its M - f - 2 nearest others, f the most attackers M allows."""
    num = len(deltas)
    if num < 3:
        return 0
    attackers = (num - 3) // 2
    distances = torch.cdist(deltas[None], deltas[None], compute_mode="donot_use_mm_for_euclid_dist")[0].square()
    nearest = distances.sort(dim=1).values[:, 1 : num - attackers - 1]  # the first is the update itself
    return int(nearest.sum(dim=1).argmin())


@dataclass(frozen=True, slots=True)
class Buffer:
    """S, the sum of the weighted deltas, and the sum of the statistics over the m updates so far. Owned: changed in place.

    Rules other than the mean need the updates themselves, so ``deltas`` and ``statistics`` keep those instead. A rule for the
    statistics only uses ``statistics`` alone. ``examples`` is the sum of n_i for updates weighted by their examples, otherwise 0.
    """

    delta_sum: Tensor
    buffers_sum: Tensor
    size: int = 0
    deltas: list[Tensor] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    examples: float = 0.0

    @classmethod
    def empty(cls, model: GlobalModel) -> "Buffer":
        return cls(torch.zeros_like(model.weights.params), torch.zeros_like(model.weights.buffers))

    def add(
        self,
        delta: Tensor,
        buffers: Tensor,
        weight: float = 1.0,
        examples: float = 0.0,
        statistics: StatisticsRule = "mean",
    ) -> "Buffer":
        """S += w Delta, or S += w n Delta with n = ``examples``. Statistics are averaged by value, so only n weights them."""
        count = examples or 1.0
        self.delta_sum.add_(delta, alpha=weight * count)
        self.buffers_sum.add_(buffers, alpha=count)
        if statistics == "median":
            self.statistics.append(buffers.clone())
        # Not dataclasses.replace, which takes as long as both additions of a small model.
        return Buffer(self.delta_sum, self.buffers_sum, self.size + 1, self.deltas, self.statistics, self.examples + examples)

    def keep(self, delta: Tensor, buffers: Tensor, weight: float, rule: StepRule, examples: float = 0.0) -> "Buffer":
        """Add an update for ``combine`` with the same rule. For the mean this is ``add``."""
        if rule == "mean":
            return self.add(delta, buffers, weight, examples)
        self.deltas.append(delta * weight)
        self.statistics.append(buffers.clone())
        return replace(self, size=self.size + 1)

    def combine(self, rule: StepRule) -> "Buffer":
        """Return a buffer whose sums are m times the combined update, so that its mean is that update."""
        if rule == "mean":
            return self
        delta, statistics = combined(torch.stack(self.deltas), torch.stack(self.statistics), rule)
        return replace(self, delta_sum=delta * self.size, buffers_sum=statistics * self.size, deltas=[], statistics=[])

    @property
    def total(self) -> float:
        """The divisor of the sums: the sum of n_i, or M if all updates count equally."""
        return self.examples or self.size

    def mean_buffers(self) -> Tensor:
        """Return the mean of the statistics, or their median if the statistics themselves were kept."""
        if self.statistics:
            return median(torch.stack(self.statistics))
        return self.buffers_sum / self.total

    def mean_step(self, model: GlobalModel, server_lr: float) -> Weights:
        """Return x + eta S / M (or eta S / sum of n_i if updates are weighted by examples) and the mean statistics."""
        return Weights(model.weights.params.add(self.delta_sum, alpha=server_lr / self.total), self.mean_buffers())

    def cleared(self) -> "Buffer":
        self.delta_sum.zero_()
        self.buffers_sum.zero_()
        self.statistics.clear()
        return replace(self, size=0, examples=0.0)

"""The buffer that every buffered method keeps: a running sum of deltas and of BatchNorm statistics."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedecho.algorithms.robust import StatisticsRule, StepRule, combined
from fedecho.core.types import GlobalModel, Weights
from fedecho.distill.robust import middle


@dataclass(frozen=True, slots=True)
class Buffer:
    """S and the buffers' sum over the m updates so far. Owned: changed in place.

    A rule other than the mean needs the updates themselves: then they are kept instead, in ``deltas`` and ``statistics``; or the
    statistics alone, where only these have a rule.
    ``examples`` is the sum of the n_i of updates that count by their examples, and 0 where all count alike.
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
        """S += w Delta, or w n Delta with the client's n ``examples``. Statistics count by n alone: they are averaged by value."""
        count = examples or 1.0
        self.delta_sum.add_(delta, alpha=weight * count)
        self.buffers_sum.add_(buffers, alpha=count)
        if statistics == "median":
            self.statistics.append(buffers.clone())
        # By hand: dataclasses.replace takes as long as both additions of a small model.
        return Buffer(self.delta_sum, self.buffers_sum, self.size + 1, self.deltas, self.statistics, self.examples + examples)

    def keep(self, delta: Tensor, buffers: Tensor, weight: float, rule: StepRule, examples: float = 0.0) -> "Buffer":
        """As ``add``, for the rule by which the buffer will become one update."""
        if rule == "mean":
            return self.add(delta, buffers, weight, examples)
        self.deltas.append(delta * weight)
        self.statistics.append(buffers.clone())
        return replace(self, size=self.size + 1)

    def combine(self, rule: StepRule) -> "Buffer":
        """What was kept as m times the one update it comes to, so that means over it are that update."""
        if rule == "mean":
            return self
        delta, statistics = combined(torch.stack(self.deltas), torch.stack(self.statistics), rule)
        return replace(self, delta_sum=delta * self.size, buffers_sum=statistics * self.size, deltas=[], statistics=[])

    @property
    def total(self) -> float:
        """What the sums are divided by: the sum of n_i, or M where all updates count alike."""
        return self.examples or self.size

    def mean_buffers(self) -> Tensor:
        """The mean statistics, or their median where they were kept for it."""
        if self.statistics:
            return middle(torch.stack(self.statistics))
        return self.buffers_sum / self.total

    def mean_step(self, model: GlobalModel, server_lr: float) -> Weights:
        """x + eta S / M (S / sum of n_i where updates count by their examples), and the mean statistics."""
        return Weights(model.weights.params.add(self.delta_sum, alpha=server_lr / self.total), self.mean_buffers())

    def cleared(self) -> "Buffer":
        self.delta_sum.zero_()
        self.buffers_sum.zero_()
        self.statistics.clear()
        return replace(self, size=0, examples=0.0)

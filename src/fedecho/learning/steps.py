"""The steps of a job, whichever way they are made: eager here, replayed in ``replayed.py``."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedecho.core.layout import BoundNetwork
from fedecho.core.task import Batch, Task
from fedecho.learning.descent import bias_correction, rule_of, wants_moments, wants_raw_mean
from fedecho.learning.local import LocalTraining


class Steps(Protocol):
    """K steps from the weights that the network holds; nothing is remembered from one job to the next."""

    def begin(self, start: Tensor, shift: Tensor | None, num_steps: int) -> None:
        """A job of ``num_steps`` from x_s = ``start``; ``shift`` is c - c_i, None for zero."""
        ...

    def step(self, batch: Batch) -> None: ...

    def raw_mean(self) -> Tensor | None:
        """The mean raw gradient, the caller's own; None where nobody asks for it."""
        ...

    def mean_loss(self) -> float: ...


def gradient(task: Task, network: BoundNetwork, batch: Batch, raw: Tensor | None, share: float) -> Tensor:
    """The gradient into ``network.grads``, and a share of it into ``raw``; the loss."""
    network.grads.zero_()
    loss = task.loss(network.module, batch)
    loss.backward()
    if raw is not None:
        raw.add_(network.grads, alpha=share)
    return loss.detach()


@dataclass
class EagerSteps:
    """One operation after the other."""

    task: Task
    local: LocalTraining
    network: BoundNetwork
    _count: int = field(default=0, init=False)
    _losses: list[Tensor] = field(default_factory=list, init=False)

    def begin(self, start: Tensor, shift: Tensor | None, num_steps: int) -> None:
        params = self.network.weights.params
        self._count, self._losses, self._share = 0, [], 1 / num_steps
        self._from = (start if self.local.proximal else None, shift)
        self._raw = torch.zeros_like(params) if wants_raw_mean(self.local) else None
        self._moments = (torch.zeros_like(params), torch.zeros_like(params)) if wants_moments(self.local) else ()

    def step(self, batch: Batch) -> None:
        network, local = self.network, self.local
        self._losses.append(gradient(self.task, network, batch, self._raw, self._share))
        self._count += 1
        bias = bias_correction(local, float(self._count)) if self._moments else ()
        rule_of(local)(local, network.weights.params, network.grads, *self._from, *self._moments, *bias)

    def raw_mean(self) -> Tensor | None:
        return self._raw

    def mean_loss(self) -> float:
        return float(torch.stack(self._losses).mean())

"""Differential privacy: client reports are clipped and noised, at the client or in the server's buffer."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedecho.core.randomness import torch_rng
from fedecho.core.ranges import Factor, check_ranges, positive, share
from fedecho.core.types import ClientUpdate, GlobalModel


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The Gaussian mechanism on each report.

    (Delta, change in the statistics) is clipped to ``clip_norm``; the noise has standard deviation noise_multiplier * clip_norm.
    A ``noise_multiplier`` of 0 switches privacy off.

    ``where = "client"`` adds noise to every report before it is sent, which protects all of a client's data against everybody.
    ``where = "server"`` adds noise once per buffer, which protects against everybody but the server. ``delta`` is the failure
    probability that accompanies epsilon. Metrics, counts and control variates would leak information, so they are not sent.
    """

    clip_norm: Annotated[float, positive()] = 1.0
    noise_multiplier: Factor = 0.0
    delta: Annotated[float, share(above=True, below=True)] = 1e-5
    where: Literal["client", "server"] = "client"

    def __post_init__(self) -> None:
        check_ranges(self, "privacy.")

    @property
    def on(self) -> bool:
        return self.noise_multiplier > 0

    def sent(
        self, update: ClientUpdate, base: GlobalModel, seed: int, variances: Tensor, *, noisy: bool = True
    ) -> ClientUpdate:
        """Clip an update and add noise. ``variances`` is a mask of the statistics that must not become negative."""
        joint = torch.cat([update.delta, update.buffers - base.weights.buffers])
        private = joint * (self.clip_norm / torch.linalg.vector_norm(joint)).clamp_max(1.0)
        if noisy:
            noise = torch.randn(joint.shape, generator=torch_rng(seed, "privacy")).to(joint)
            private = private + noise * (self.noise_multiplier * self.clip_norm)
        delta, moved = private.split([len(update.delta), len(update.buffers)])
        buffers = base.weights.buffers + moved
        buffers = torch.where(variances, buffers.clamp_min(0.0), buffers)  # after the noise, so it costs no privacy
        return replace(update, delta=delta.clone(), buffers=buffers, num_examples=1, num_steps=1, metrics={})

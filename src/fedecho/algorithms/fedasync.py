"""FedAsync. Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedecho.algorithms.buffer import Grace, Power, Slope, StalenessName, staleness_weight
from fedecho.core.algorithm import Demands
from fedecho.core.ranges import Factor, check_ranges, share
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights
from fedecho.distill.teachers import middle

RECENT = 5
"""The median of statistics is that of so many arrivals."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The client's model y and the a_t it is mixed with; the last statistics, where their median is wanted. Owned."""

    mixing: float = 0.0
    client_params: Tensor | None = None
    client_buffers: Tensor | None = None
    recent: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FedAsync:
    """Every arrival is a step: x <- (1 - a_t) x + a_t y with a_t = a s(tau). Clients add a proximal term.

    BatchNorm's statistics are those of the ``latest`` client, or the ``median`` of the last five arrivals, which a few bad clients
    cannot turn.
    """

    mixing: Annotated[float, share(above=True)] = 0.6
    staleness: StalenessName = "polynomial"
    power: Power = 0.5
    slope: Slope = 10.0
    grace: Grace = 4
    proximal: Factor = 0.005
    statistics: Literal["latest", "median"] = "latest"

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def buffer_size(self) -> int:
        return 1

    @property
    def demands(self) -> Demands:
        return Demands(proximal=self.proximal)

    def init(self, model: GlobalModel) -> Mixture:
        return Mixture()

    def receive(self, state: Mixture, arrival: Arrival) -> Mixture:
        weight = staleness_weight(self.staleness, self.power, self.slope, self.grace)(arrival.staleness)
        params = arrival.base.weights.params + arrival.update.delta
        buffers = arrival.update.buffers.clone()
        if self.statistics == "latest":
            return Mixture(self.mixing * weight, params, buffers)
        recent = [*state.recent, buffers][-RECENT:]
        return Mixture(self.mixing * weight, params, middle(torch.stack(recent)), recent)

    def ready(self, state: Mixture) -> bool:
        return state.client_params is not None

    def advance(self, state: Mixture, model: GlobalModel) -> Advance[Mixture]:
        if state.client_params is None or state.client_buffers is None:
            raise RuntimeError("advance before an arrival")
        params = model.weights.params.lerp(state.client_params, state.mixing)
        weights = Weights(params, state.client_buffers)
        metrics = {"mixing": state.mixing}
        return Advance(replace(state, client_params=None, client_buffers=None), weights, metrics=metrics)

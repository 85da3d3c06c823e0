"""FedAsync. Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedecho.algorithms.buffer import Grace, Power, Slope, StalenessName, staleness_weight
from fedecho.core.algorithm import Demands
from fedecho.core.ranges import Factor, check_ranges, share
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights
from fedecho.distill.teachers import median

RECENT = 5
"""How many arrivals the median of the statistics covers."""


@dataclass(frozen=True, slots=True)
class FedAsyncState:
    """The client's model y, its mixing weight a_t and, for their median, the recent statistics. Owned."""

    mixing: float = 0.0
    client_params: Tensor | None = None
    client_buffers: Tensor | None = None
    recent: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FedAsync:
    """Every arrival is a step: x <- (1 - a_t) x + a_t y with a_t = a s(tau). Clients add a proximal term.

    BatchNorm's statistics are those of the ``latest`` client or the ``median`` of the last five arrivals, which is robust against
    a few malicious clients.
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

    def init(self, model: GlobalModel) -> FedAsyncState:
        return FedAsyncState()

    def receive(self, state: FedAsyncState, arrival: Arrival) -> FedAsyncState:
        weight = staleness_weight(self.staleness, self.power, self.slope, self.grace)(arrival.staleness)
        params = arrival.base.weights.params + arrival.update.delta
        buffers = arrival.update.buffers.clone()
        if self.statistics == "latest":
            return FedAsyncState(self.mixing * weight, params, buffers)
        recent = [*state.recent, buffers][-RECENT:]
        return FedAsyncState(self.mixing * weight, params, median(torch.stack(recent)), recent)

    def ready(self, state: FedAsyncState) -> bool:
        return state.client_params is not None

    def advance(self, state: FedAsyncState, model: GlobalModel) -> Advance[FedAsyncState]:
        if state.client_params is None or state.client_buffers is None:
            raise RuntimeError("FedAsync has no update to apply: call receive before advance")
        params = model.weights.params.lerp(state.client_params, state.mixing)
        weights = Weights(params, state.client_buffers)
        metrics = {"mixing": state.mixing}
        return Advance(replace(state, client_params=None, client_buffers=None), weights, metrics=metrics)

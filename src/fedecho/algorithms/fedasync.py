"""FedAsync. Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019."""

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from fedecho.algorithms.staleness import Grace, Power, Slope, StalenessName, staleness_weight
from fedecho.core.algorithm import Demands
from fedecho.core.ranges import Factor, check_ranges, share
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights


@dataclass(frozen=True, slots=True)
class Mixture:
    """The client's model y and the a_t it is mixed with. Owned."""

    mixing: float = 0.0
    client_params: Tensor | None = None
    client_buffers: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class FedAsync:
    """Every arrival is a step: x <- (1 - a_t) x + a_t y with a_t = a s(tau). Clients add a proximal term."""

    mixing: Annotated[float, share(above=True)] = 0.6
    staleness: StalenessName = "polynomial"
    power: Power = 0.5
    slope: Slope = 10.0
    grace: Grace = 4
    proximal: Factor = 0.005

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
        return Mixture(self.mixing * weight, params, arrival.update.buffers.clone())

    def ready(self, state: Mixture) -> bool:
        return state.client_params is not None

    def advance(self, state: Mixture, model: GlobalModel) -> Advance[Mixture]:
        if state.client_params is None or state.client_buffers is None:
            raise RuntimeError("advance before an arrival")
        params = model.weights.params.lerp(state.client_params, state.mixing)
        weights = Weights(params, state.client_buffers)
        metrics = {"mixing": state.mixing}
        return Advance(replace(state, client_params=None, client_buffers=None), weights, metrics=metrics)

"""FedAsync. Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019."""

from dataclasses import dataclass, replace

from torch import Tensor

from fedecho.algorithms.staleness import StalenessName, staleness_weight
from fedecho.core.algorithm import Demands
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

    mixing: float = 0.6
    staleness: StalenessName = "polynomial"
    power: float = 0.5
    slope: float = 10.0
    grace: int = 4
    proximal: float = 0.005

    def __post_init__(self) -> None:
        if not 0 < self.mixing <= 1:
            raise ValueError(f"mixing must be above 0 and at most 1, got {self.mixing}")
        if self.proximal < 0:
            raise ValueError(f"proximal must be at least 0, got {self.proximal}")
        staleness_weight(self.staleness, self.power, self.slope, self.grace)

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

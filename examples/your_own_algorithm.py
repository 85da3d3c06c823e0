"""Your own algorithm in twenty lines: a frozen dataclass with four methods and an explicit state.

This one adds server momentum to FedBuff: each step continues a little in the direction of the last one.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedecho import Advance, Arrival, GlobalModel, Weights, load, simulate


@dataclass(frozen=True)
class State:
    delta_sum: Tensor
    buffers_sum: Tensor
    velocity: Tensor
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class FedBuffMomentum:
    buffer_size: int = 3
    momentum: float = 0.2

    def init(self, model: GlobalModel) -> State:
        params, buffers = model.weights.params, model.weights.buffers
        return State(torch.zeros_like(params), torch.zeros_like(buffers), torch.zeros_like(params))

    def receive(self, state: State, arrival: Arrival) -> State:
        state.delta_sum.add_(arrival.update.delta)  # owned by the state: in-place is fine
        state.buffers_sum.add_(arrival.update.buffers)
        return replace(state, size=state.size + 1)

    def ready(self, state: State) -> bool:
        return state.size == self.buffer_size

    def advance(self, state: State, model: GlobalModel) -> Advance[State]:
        velocity = state.velocity.mul_(self.momentum).add_(state.delta_sum, alpha=1 / state.size)
        weights = Weights(model.weights.params + velocity, state.buffers_sum / state.size)
        fresh = replace(state, delta_sum=state.delta_sum.zero_(), buffers_sum=state.buffers_sum.zero_(), size=0)
        return Advance(fresh, weights)


if __name__ == "__main__":
    experiment = load("digits", algorithm="fedbuff")
    for algorithm in (experiment.algorithm, FedBuffMomentum()):
        result = simulate(replace(experiment, algorithm=algorithm))
        print(f"{type(algorithm).__name__}: {100 * result.accuracy:.1f} %")

"""CA2FL. Wang et al., Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update Calibration,
ICLR 2024."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedecho.algorithms.buffer import Buffer, StatisticsRule
from fedecho.core.ranges import InFlight, NumClients, Rate, check_ranges
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights
from fedecho.storage.client_memory import ClientMemory, MemoryPlace, check_memory_place


@dataclass(frozen=True, slots=True)
class CA2FLState:
    """h_i of every client, their mean h over all N clients, and the accumulator D as a buffer. Owned."""

    cached_delta: ClientMemory
    mean: Tensor
    buffer: Buffer


@dataclass(frozen=True, kw_only=True)
class CA2FL:
    """v = h + D / M with D = sum of (Delta_i - h_i) and h before this buffer. h_i is 0 until client i reports.

    ``memory`` says where the N cached updates are stored: on the model's device, in main memory or in a mapped file in
    ``memory_dir``. ``statistics = "median"`` makes BatchNorm's statistics robust against a few malicious clients.
    """

    buffer_size: InFlight
    num_clients: NumClients
    server_lr: Rate = 1.0
    memory: MemoryPlace = "cpu"
    memory_dir: str | None = None
    statistics: StatisticsRule = "mean"

    def __post_init__(self) -> None:
        check_ranges(self)
        check_memory_place(self.memory, self.memory_dir, "algorithm.memory", "algorithm.memory_dir")

    def init(self, model: GlobalModel) -> CA2FLState:
        params = model.weights.params
        cached = ClientMemory(self.num_clients, params, self.memory, self.memory_dir, setting="algorithm.memory_dir")
        return CA2FLState(cached, torch.zeros_like(params), Buffer.empty(model))

    def receive(self, state: CA2FLState, arrival: Arrival) -> CA2FLState:
        update = arrival.update
        buffer = state.buffer.add(update.delta, update.buffers, statistics=self.statistics)
        if update.client in state.cached_delta:
            buffer.delta_sum.sub_(state.cached_delta[update.client])
        state.cached_delta[update.client] = update.delta
        return replace(state, buffer=buffer)

    def ready(self, state: CA2FLState) -> bool:
        return state.buffer.size >= self.buffer_size

    def advance(self, state: CA2FLState, model: GlobalModel) -> Advance[CA2FLState]:
        buffer = state.buffer
        direction = state.mean.add(buffer.delta_sum, alpha=1 / buffer.size)
        weights = Weights(model.weights.params.add(direction, alpha=self.server_lr), buffer.mean_buffers())
        state.mean.add_(buffer.delta_sum, alpha=1 / self.num_clients)
        return Advance(replace(state, buffer=buffer.cleared()), weights)

"""FedAvg, the synchronous reference. McMahan et al., AISTATS 2017; a server learning rate as in Reddi et al., ICLR 2021."""

from dataclasses import dataclass

from fedecho.algorithms.buffer import Buffer, StepRule, check_rule
from fedecho.core.algorithm import Demands
from fedecho.core.ranges import InFlight, Rate, check_ranges
from fedecho.core.types import Advance, Arrival, GlobalModel


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """Synchronous rounds: wait for M clients that all start from x_t, then x += eta mean(Delta).

    ``weighted`` weights the mean by the clients' numbers of examples. A ``combine`` other than the mean is robust against a few
    malicious clients (algorithms/buffer.py).
    """

    buffer_size: InFlight
    server_lr: Rate = 1.0
    combine: StepRule = "mean"
    weighted: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)
        check_rule(self.combine, self.weighted)

    @property
    def demands(self) -> Demands:
        return Demands(synchronous=True)

    def init(self, model: GlobalModel) -> Buffer:
        return Buffer.empty(model)

    def receive(self, state: Buffer, arrival: Arrival) -> Buffer:
        update = arrival.update
        examples = update.num_examples if self.weighted else 0.0
        return state.keep(update.delta, update.buffers, 1.0, self.combine, examples)

    def ready(self, state: Buffer) -> bool:
        return state.size >= self.buffer_size

    def advance(self, state: Buffer, model: GlobalModel) -> Advance[Buffer]:
        full = state.combine(self.combine)
        weights = full.mean_step(model, self.server_lr)
        return Advance(full.cleared(), weights)

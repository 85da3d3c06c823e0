"""FedBuff. Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022."""

from dataclasses import dataclass

from fedecho.algorithms.buffer import Buffer, Grace, Power, Slope, StalenessName, StepRule, check_rule, staleness_weight
from fedecho.core.ranges import InFlight, Rate, check_ranges
from fedecho.core.types import Advance, Arrival, GlobalModel


@dataclass(frozen=True, kw_only=True)
class FedBuff:
    """x += eta S / M over a buffer of M updates, with S = sum of w(tau) Delta_i.

    ``staleness="constant"`` is the baseline of the FedEcho paper; ``"polynomial"`` with power 1/2 is the original paper's weight.
    A ``combine`` other than the mean is robust against a few malicious clients (algorithms/buffer.py).
    ``weighted`` multiplies w(tau) by n_i / mean(n), where n_i is the client's number of examples.
    """

    buffer_size: InFlight
    server_lr: Rate = 1.0
    staleness: StalenessName = "constant"
    power: Power = 0.5
    slope: Slope = 10.0
    grace: Grace = 4
    combine: StepRule = "mean"
    weighted: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)
        check_rule(self.combine, self.weighted)

    def init(self, model: GlobalModel) -> Buffer:
        return Buffer.empty(model)

    def receive(self, state: Buffer, arrival: Arrival) -> Buffer:
        weight = staleness_weight(self.staleness, self.power, self.slope, self.grace)(arrival.staleness)
        update = arrival.update
        return state.keep(update.delta, update.buffers, weight, self.combine, update.num_examples if self.weighted else 0.0)

    def ready(self, state: Buffer) -> bool:
        return state.size >= self.buffer_size

    def advance(self, state: Buffer, model: GlobalModel) -> Advance[Buffer]:
        full = state.combine(self.combine)
        weights = full.mean_step(model, self.server_lr)
        return Advance(full.cleared(), weights)

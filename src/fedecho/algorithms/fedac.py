"""FedAC. Zang et al., Efficient Asynchronous Federated Learning with Prospective Momentum Aggregation and
Fine-Grained Correction, AAAI 2024. Follows the public implementation with three fixes, listed in docs/algorithms.md."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedecho.algorithms.buffer import Buffer, clipped_mean
from fedecho.core.algorithm import Demands
from fedecho.core.ranges import Decay, Epsilon, InFlight, NumClients, Rate, check_ranges, positive
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights


@dataclass(frozen=True, slots=True)
class FedACState:
    """The buffer of deltas weighted by r_i, the sum of r_i, the sum of the changes to c, the two moments, and c. Owned.

    With clipping, ``corrections`` keeps the changes to c themselves instead of their sum.
    """

    buffer: Buffer
    weight_sum: float
    correction_sum: Tensor
    first: Tensor
    second: Tensor
    correction: Tensor
    corrections: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FedAC:
    """Updates weighted by their agreement with the model's movement, look-ahead momentum and control variates at the clients.

    r_i = max(cos(x_t - x_s, Delta_i), ``min_agreement``), or 1 for an update with staleness 0; D = sum r_i Delta_i / sum r_i.

    Clients correct every ``step`` by c - c_i, or their final parameters ``once``, as the newest public implementations do.
    ``control_variates = False`` leaves the clients' steps uncorrected (docs/algorithms.md says when that is better).
    ``weighted_correction = False`` moves c by sum dc_i / N, so that it stays the mean of all c_i. By default dc_i is weighted by
    r_i too, as in the public implementation, and c drifts away from that mean permanently.
    ``combine = "clipped"`` is robust against a few malicious clients: it scales each r_i Delta_i and each dc_i down to the
    buffer's median norm and takes the median of the statistics.
    """

    buffer_size: InFlight
    num_clients: NumClients
    server_lr: Rate = 1e-4
    beta1: Decay = 0.6
    beta2: Decay = 0.9
    eps: Epsilon = 1e-8
    min_agreement: Annotated[float, positive()] = 0.1
    control_variates: bool = True
    weighted_correction: bool = True
    correction: Literal["step", "once"] = "step"
    combine: Literal["mean", "clipped"] = "mean"

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def demands(self) -> Demands:
        return Demands(control_variates=self.control_variates, correct_once=self.control_variates and self.correction == "once")

    def init(self, model: GlobalModel) -> FedACState:
        zero = torch.zeros_like(model.weights.params)
        return FedACState(Buffer.empty(model), 0.0, zero.clone(), zero.clone(), zero.clone(), zero)

    def receive(self, state: FedACState, arrival: Arrival) -> FedACState:
        update, weight = arrival.update, self._agreement(arrival)
        if self.control_variates:
            if update.correction is None:
                raise ValueError(f"client {update.client} sent no correction: FedAC's clients must train with control variates")
            share = weight if self.weighted_correction else 1.0
            if self.combine == "mean":
                state.correction_sum.add_(update.correction, alpha=share)
            else:
                state.corrections.append(update.correction * share)
        buffer = state.buffer.keep(update.delta, update.buffers, weight, self.combine)
        return replace(state, buffer=buffer, weight_sum=state.weight_sum + weight)

    def ready(self, state: FedACState) -> bool:
        return state.buffer.size >= self.buffer_size

    def advance(self, state: FedACState, model: GlobalModel) -> Advance[FedACState]:
        full = state.buffer.combine(self.combine)
        mean = full.delta_sum / state.weight_sum
        first = state.first.mul_(self.beta1).add_(mean, alpha=1 - self.beta1)
        second = state.second.mul_(self.beta2).addcmul_(mean, mean, value=1 - self.beta2)
        ahead = self.beta1 * first + (1 - self.beta1) * mean
        params = model.weights.params.addcdiv(ahead, second.sqrt().add_(self.eps), value=self.server_lr)
        if state.corrections:
            state.correction_sum.copy_(clipped_mean(torch.stack(state.corrections))).mul_(len(state.corrections))
        share, weight_sum = (state.buffer.size, state.weight_sum) if self.weighted_correction else (1, 1.0)
        correction = state.correction.add(state.correction_sum, alpha=share / self.num_clients / weight_sum)
        weights = Weights(params, full.mean_buffers())
        new_state = replace(
            state,
            buffer=full.cleared(),
            weight_sum=0.0,
            correction_sum=state.correction_sum.zero_(),
            correction=correction,
            corrections=[],
        )
        return Advance(new_state, weights, correction.clone() if self.control_variates else None)

    def without_corrections(self, state: FedACState) -> FedACState:
        """Return the state with c = 0 and no pending changes to c, for clients that have lost their c_i."""
        zeros = torch.zeros_like(state.correction)
        return replace(state, correction_sum=state.correction_sum.zero_(), correction=zeros, corrections=[])

    def _agreement(self, arrival: Arrival) -> float:
        if arrival.staleness == 0:
            return 1.0
        moved = arrival.current.weights.params - arrival.base.weights.params
        return max(float(cosine_similarity(moved, arrival.update.delta, dim=0)), self.min_agreement)

"""FADAS. Wang et al., FADAS: Towards Federated Adaptive Asynchronous Optimization, ICML 2024."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fedecho.algorithms.buffer import Buffer, StepRule, check_rule
from fedecho.core.ranges import Decay, Epsilon, InFlight, Rate, at_least, check_ranges
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights


@dataclass(frozen=True, slots=True)
class FADASState:
    """The buffer, m, v and its running maximum v_hat, the number of steps and the buffer's largest staleness. Owned."""

    buffer: Buffer
    first: Tensor
    second: Tensor
    second_max: Tensor
    num_steps: int = 0
    max_staleness: int = 0


@dataclass(frozen=True, kw_only=True)
class FADAS:
    """AMSGrad on the mean of M deltas. The default is the variant in the paper's tables, without delay adaptation.

    ``delay_adaptive`` uses eta / tau_max for a buffer whose largest staleness exceeds ``staleness_threshold`` (tau_c); the
    authors combine it with a server_lr of 1e-3. ``bias_correction`` follows the authors' code; the published formula has none.
    ``weighted`` weights the mean by the clients' numbers of examples.
    """

    buffer_size: InFlight
    server_lr: Rate = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    eps: Epsilon = 1e-8
    bias_correction: bool = True
    delay_adaptive: bool = False
    staleness_threshold: Annotated[int, at_least(0)] = 1
    combine: StepRule = "mean"
    weighted: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)
        check_rule(self.combine, self.weighted)

    def init(self, model: GlobalModel) -> FADASState:
        zero = torch.zeros_like(model.weights.params)
        return FADASState(Buffer.empty(model), zero, zero.clone(), zero.clone())

    def receive(self, state: FADASState, arrival: Arrival) -> FADASState:
        update = arrival.update
        examples = update.num_examples if self.weighted else 0.0
        buffer = state.buffer.keep(update.delta, update.buffers, 1.0, self.combine, examples)
        return replace(state, buffer=buffer, max_staleness=max(state.max_staleness, arrival.staleness))

    def ready(self, state: FADASState) -> bool:
        return state.buffer.size >= self.buffer_size

    def advance(self, state: FADASState, model: GlobalModel) -> Advance[FADASState]:
        step, full = state.num_steps + 1, state.buffer.combine(self.combine)
        mean = full.delta_sum / full.total
        first = state.first.mul_(self.beta1).add_(mean, alpha=1 - self.beta1)
        second = state.second.mul_(self.beta2).addcmul_(mean, mean, value=1 - self.beta2)
        second_max = torch.maximum(state.second_max, second, out=state.second_max)
        unbias1, unbias2 = self._unbias(step)
        scale = (second_max / unbias2).sqrt_().add_(self.eps)
        server_lr = self._server_lr(state.max_staleness)
        params = model.weights.params.addcdiv(first, scale, value=server_lr / unbias1)
        weights = Weights(params, full.mean_buffers())
        new_state = replace(state, buffer=full.cleared(), num_steps=step, max_staleness=0)
        return Advance(new_state, weights, metrics={"server_lr": server_lr})

    def _unbias(self, step: int) -> tuple[float, float]:
        return (1 - self.beta1**step, 1 - self.beta2**step) if self.bias_correction else (1.0, 1.0)

    def _server_lr(self, max_staleness: int) -> float:
        slow = self.delay_adaptive and max_staleness > self.staleness_threshold
        return self.server_lr / max_staleness if slow else self.server_lr

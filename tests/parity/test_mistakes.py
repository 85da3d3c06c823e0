"""Mistakes seen in public implementations of these methods, each planted here and caught.

A check is a function of the thing that could be wrong. It must pass for the package's own and raise for every variant with the
mistake in it; so the checks are known to bite. The numbers are worked out by hand on one scalar parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedecho.algorithms import CA2FL, FADAS, FedAsync, FedBuff
from fedecho.algorithms.buffer import Buffer
from fedecho.algorithms.ca2fl import CA2FLState
from fedecho.algorithms.fadas import FADASState
from fedecho.algorithms.fedasync import FedAsyncState
from fedecho.core.layout import Layout, _parts
from fedecho.core.types import Advance, Arrival, ClientUpdate, GlobalModel, Weights

Heard = tuple[int, int, float]
"""Client, base version, Delta."""


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trace(algorithm: Any, *rounds: list[Heard]) -> list[float]:
    """x_1, x_2, ... of a scalar model that starts at 0."""
    models = [GlobalModel(0, Weights(vector(0.0), vector()))]
    state = algorithm.init(models[0])
    for arrivals in rounds:
        for client, base, delta in arrivals:
            update = ClientUpdate(client, base, vector(delta), vector(), num_examples=1, num_steps=1)
            state = algorithm.receive(state, Arrival(update, models[base], models[-1]))
        advance = algorithm.advance(state, models[-1])
        state = advance.state
        models.append(GlobalModel(len(models), advance.weights))
    return [float(model.weights.params) for model in models[1:]]


def near(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-9)


# CA2FL: calibration that is always 0, and h refreshed before use.


def check_calibration(make: type[CA2FL]) -> None:
    """N = 2, M = 1. h is 0, 1/2, 1/2, 2 before the four steps, the surprises are 1, 0, 3, 0."""
    heard = [[(0, 0, 1.0)], [(0, 1, 1.0)], [(1, 2, 3.0)], [(1, 3, 3.0)]]
    assert trace(make(buffer_size=1, num_clients=2), *heard) == near(1.0, 1.5, 5.0, 7.0)


class ForgetsWhoSpoke(CA2FL):
    def receive(self, state: CA2FLState, arrival: Arrival) -> CA2FLState:
        return replace(state, buffer=state.buffer.add(arrival.update.delta, arrival.update.buffers))


class NeverCalibrates(ForgetsWhoSpoke):
    def advance(self, state: CA2FLState, model: GlobalModel) -> Advance[CA2FLState]:
        return super().advance(replace(state, mean=torch.zeros_like(state.mean)), model)


class RefreshesTheMeanFirst(CA2FL):
    def advance(self, state: CA2FLState, model: GlobalModel) -> Advance[CA2FLState]:
        early = state.mean + state.buffer.delta_sum / self.num_clients
        advance = super().advance(replace(state, mean=early.clone()), model)
        return replace(advance, state=replace(advance.state, mean=early))


class RefreshesTheClientFirst(CA2FL):
    def receive(self, state: CA2FLState, arrival: Arrival) -> CA2FLState:
        state.cached_delta[arrival.update.client] = arrival.update.delta
        return super().receive(state, arrival)


# FADAS: sqrt(v) for sqrt(v_hat).


def check_running_maximum(make: type[FADAS]) -> None:
    """Deltas 4, then 1, with b1 = 0 and b2 = 1/2: v is 8, then 4.5; v_hat stays 8 and is unbiased by 1/2, then 3/4."""
    algorithm = make(buffer_size=1, server_lr=1.0, beta1=0.0, beta2=0.5, eps=1e-12)
    assert trace(algorithm, [(0, 0, 4.0)], [(0, 1, 1.0)]) == near(1.0, 1.0 + 1.0 / sqrt(8 / 0.75))


class ForgetsTheMaximum(FADAS):
    def advance(self, state: FADASState, model: GlobalModel) -> Advance[FADASState]:
        return super().advance(replace(state, second_max=torch.zeros_like(state.second)), model)


# FedBuff: divided by M twice, or not at all.


def check_division(make: type[FedBuff]) -> None:
    heard = [(0, 0, 1.0), (1, 0, 2.0), (2, 0, 6.0)]
    assert trace(make(buffer_size=3, server_lr=2.0), heard) == near(6.0)


class DividesTwice(FedBuff):
    def advance(self, state: Buffer, model: GlobalModel) -> Advance[Buffer]:
        return Advance(state.cleared(), state.mean_step(model, self.server_lr / state.size / self.buffer_size))


class OnlySums(FedBuff):
    def advance(self, state: Buffer, model: GlobalModel) -> Advance[Buffer]:
        return Advance(state, Weights(model.weights.params + self.server_lr * state.delta_sum, state.mean_buffers()))


# FedAsync: y built on the current model, the hinge without its + 1, a mixing factor that compounds.


def check_base(make: type[FedAsync]) -> None:
    """With a = 1/2: x = 1/2 * 4 = 2, then y = 0 + 1 from version 0, so x = 1.5; built on the current model it would be 2.5."""
    assert trace(make(mixing=0.5, staleness="constant"), [(0, 0, 4.0)], [(1, 0, 1.0)]) == near(2.0, 1.5)


class BuildsOnTheCurrent(FedAsync):
    def receive(self, state: FedAsyncState, arrival: Arrival) -> FedAsyncState:
        return super().receive(state, replace(arrival, base=arrival.current))


def check_compounding(make: type[FedAsync]) -> None:
    """y = 1 each time, tau = 0, 1, 1: the factors are 1/2, then 1/4 twice, whatever came before."""
    heard = [[(0, 0, 1.0)], [(1, 0, 1.0)], [(0, 1, 0.5)]]
    assert trace(make(mixing=0.5, power=1.0), *heard) == near(0.5, 0.625, 0.71875)


class Compounds(FedAsync):
    def receive(self, state: FedAsyncState, arrival: Arrival) -> FedAsyncState:
        fresh = super().receive(state, arrival)
        object.__setattr__(self, "mixing", fresh.mixing)
        return fresh


def stale_trace(algorithm: Any, tau: int) -> float:
    """The weight of Delta = 1 from version 0 after ``tau`` steps that changed nothing."""
    still = [[(0, t, 0.0)] for t in range(tau)]
    return trace(algorithm, *still, [(1, 0, 1.0)])[-1]


def check_hinge(make: type[FedAsync]) -> None:
    algorithm = make(mixing=1.0, staleness="hinge", slope=2.0, grace=3)
    assert [stale_trace(algorithm, tau) for tau in (0, 3, 4, 6)] == near(1.0, 1.0, 1 / 3, 1 / 7)


class HingeWithoutOne(FedAsync):
    def receive(self, state: FedAsyncState, arrival: Arrival) -> FedAsyncState:
        late = arrival.staleness - self.grace
        return replace(super().receive(state, arrival), mixing=self.mixing * (1.0 if late <= 0 else 1 / (self.slope * late)))


def check_root(make: Callable[[], Any]) -> None:
    """1 / sqrt(1 + tau); 1 / (1 + sqrt(tau)) agrees at 0 only, and is 1/2 for 1/sqrt(2) at 1."""
    assert [stale_trace(make(), tau) for tau in (0, 1, 3, 8)] == near(1.0, 1 / sqrt(2), 1 / 2, 1 / 3)


class BuffersOneOverOnePlusRoot(FedBuff):
    def receive(self, state: Buffer, arrival: Arrival) -> Buffer:
        return state.add(arrival.update.delta, arrival.update.buffers, 1 / (1 + sqrt(arrival.staleness)))


class MixesOneOverOnePlusRoot(FedAsync):
    def receive(self, state: FedAsyncState, arrival: Arrival) -> FedAsyncState:
        return replace(super().receive(state, arrival), mixing=self.mixing / (1 + sqrt(arrival.staleness)))


# BatchNorm statistics and counters that the server's optimiser sees.


def check_statistics(layout_of: Callable[[nn.Module], Layout]) -> None:
    """Through a FADAS step, statistics come out as the clients' plain mean, and the counter of batches takes no part."""
    server, client = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    client.running_mean.fill_(3.0)
    client.running_var.fill_(5.0)
    client.num_batches_tracked.fill_(7)
    layout = layout_of(server)
    start, end = layout.pack(server), layout.pack(client)
    model, algorithm = GlobalModel(0, start), FADAS(buffer_size=1, server_lr=0.1)
    update = ClientUpdate(0, 0, end.params - start.params, end.buffers, num_examples=1, num_steps=1)
    named = layout.named(
        algorithm.advance(algorithm.receive(algorithm.init(model), Arrival(update, model, model)), model).weights
    )
    assert set(named) == {"weight", "bias", "running_mean", "running_var"}
    assert named["running_mean"].tolist() == [3.0, 3.0]
    assert named["running_var"].tolist() == [5.0, 5.0]


def everything_optimised(module: nn.Module) -> Layout:
    return Layout(tuple(_parts(module.state_dict().items())), ())


def statistics_optimised(module: nn.Module) -> Layout:
    return Layout(tuple(_parts((k, v) for k, v in module.state_dict().items() if v.is_floating_point())), ())


def counter_averaged(module: nn.Module) -> Layout:
    return Layout(tuple(_parts(module.named_parameters())), tuple(_parts(module.named_buffers())))


@dataclass(frozen=True)
class Mistake:
    check: Callable[[Any], None]
    right: Any
    wrong: dict[str, Any]


MISTAKES = [
    Mistake(check_calibration, CA2FL, {"ids never stored": ForgetsWhoSpoke, "calibration always 0": NeverCalibrates}),
    Mistake(check_calibration, CA2FL, {"h before use": RefreshesTheMeanFirst, "h_i before use": RefreshesTheClientFirst}),
    Mistake(check_running_maximum, FADAS, {"sqrt(v)": ForgetsTheMaximum}),
    Mistake(check_division, FedBuff, {"divided twice": DividesTwice, "summed": OnlySums}),
    Mistake(check_base, FedAsync, {"y on the current model": BuildsOnTheCurrent}),
    Mistake(check_hinge, FedAsync, {"hinge without + 1": HingeWithoutOne}),
    Mistake(check_compounding, FedAsync, {"mixing compounds": Compounds}),
    Mistake(
        check_root,
        lambda: FedBuff(buffer_size=1, staleness="polynomial"),
        {"FedBuff 1/(1+sqrt)": lambda: BuffersOneOverOnePlusRoot(buffer_size=1)},
    ),
    Mistake(check_root, lambda: FedAsync(mixing=1.0), {"FedAsync 1/(1+sqrt)": lambda: MixesOneOverOnePlusRoot(mixing=1.0)}),
    Mistake(
        check_statistics,
        Layout.of,
        {"all optimised": everything_optimised, "statistics optimised": statistics_optimised, "counter kept": counter_averaged},
    ),
]
PLANTED = [pytest.param(m.check, wrong, id=name) for m in MISTAKES for name, wrong in m.wrong.items()]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: ", ".join(m.wrong))
def test_package_does_not_make_the_mistake(mistake: Mistake) -> None:
    mistake.check(mistake.right)


@pytest.mark.parametrize(("check", "wrong"), PLANTED)
def test_planted_mistake_is_caught(check: Callable[[Any], None], wrong: Any) -> None:
    with pytest.raises(AssertionError):
        check(wrong)

"""The package against the oracle: the same arrivals over 50 versions, compared after every one of them.

The norm is the largest absolute difference of any entry at any version; entries are of order 1 to 10. The package's methods are
plain arithmetic, so they run here on float64 tensors too, where a tight bound means the same formula and not luck.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import scenarios
import torch
from scenarios import BUFFER_SIZE, CLASSES, NUM_CLIENTS, NUM_VERSIONS

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.core.loop import Moment, drive
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch

TOLERANCE = 1e-12
ECHO_TOLERANCE = 1e-6
"""FedEcho's bank hands out a float32 teacher, whatever the model's precision."""
FLOAT32_TOLERANCE = 2e-5
"""Up to 250 roundings of 5e-7, the spacing of float32 between 4 and 8, most of which cancel."""

M, N = BUFFER_SIZE, NUM_CLIENTS
METHODS: dict[str, tuple[Callable[[], Any], Callable[[], oracle.Step]]] = {
    "fedavg": (lambda: FedAvg(buffer_size=M, server_lr=0.7), lambda: oracle.fedavg(0.7)),
    "fedasync-constant": (lambda: FedAsync(staleness="constant"), lambda: oracle.fedasync(0.6, oracle.one())),
    "fedasync-polynomial": (lambda: FedAsync(mixing=0.9, power=0.3), lambda: oracle.fedasync(0.9, oracle.power(0.3))),
    "fedasync-hinge": (
        lambda: FedAsync(staleness="hinge", slope=2.0, grace=3),
        lambda: oracle.fedasync(0.6, oracle.hinge(2.0, 3)),
    ),
    "fedbuff-constant": (lambda: FedBuff(buffer_size=M), lambda: oracle.fedbuff(1.0, oracle.one())),
    "fedbuff-polynomial": (
        lambda: FedBuff(buffer_size=M, server_lr=0.8, staleness="polynomial"),
        lambda: oracle.fedbuff(0.8, oracle.power(0.5)),
    ),
    "ca2fl": (lambda: CA2FL(buffer_size=M, num_clients=N, server_lr=0.9), lambda: oracle.ca2fl(0.9, N)),
    "fedac": (lambda: FedAC(buffer_size=M, num_clients=N, server_lr=0.05), lambda: oracle.fedac(0.05, N)),
    "fedac-plain-c": (
        lambda: FedAC(buffer_size=M, num_clients=N, server_lr=0.05, weighted_correction=False),
        lambda: oracle.fedac(0.05, N, weighted_c=False),
    ),
    "fadas": (lambda: FADAS(buffer_size=M, server_lr=0.05), lambda: oracle.fadas(0.05)),
    "fadas-adaptive": (
        lambda: FADAS(buffer_size=M, server_lr=0.05, delay_adaptive=True, staleness_threshold=8),
        lambda: oracle.fadas(0.05, tau_c=8),
    ),
    "fadas-published": (
        lambda: FADAS(buffer_size=M, server_lr=0.01, bias_correction=False),
        lambda: oracle.fadas(0.01, unbias=False),
    ),
    "fedavg-weighted": (
        lambda: FedAvg(buffer_size=M, server_lr=0.7, weighted=True),
        lambda: oracle.by_examples(0.7, oracle.one()),
    ),
    "fedbuff-weighted": (
        lambda: FedBuff(buffer_size=M, server_lr=0.8, staleness="polynomial", weighted=True),
        lambda: oracle.by_examples(0.8, oracle.power(0.5)),
    ),
    "fadas-weighted": (
        lambda: FADAS(buffer_size=M, server_lr=0.05, weighted=True),
        lambda: oracle.fadas(0.05, weighted=True),
    ),
}

ECHOES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "paper": ("fedbuff-constant", {}, {}),
    "clipped": ("fedbuff-constant", {"clip_norm": 0.05}, {"nu": 0.05}),
    "fresh-moments": ("fedbuff-constant", {"moments": "fresh"}, {"carried": False}),
    "probabilities": ("fedbuff-constant", {"average": "probabilities"}, {"average": "probabilities"}),
    "other-adam": ("fedbuff-polynomial", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}, {"b1": 0.5, "b2": 0.9, "eps": 1e-3}),
    "other-alphas": ("fedavg", {"alpha_min": 0.0, "alpha_max": 1.0}, {"alpha_min": 0.0, "alpha_max": 1.0}),
    "corrected": ("fedbuff-constant", {"prior_correction": 1.0}, {"correction": 1.0}),
    "corrected-by-half-and-a-high-floor": (
        "fedbuff-constant",
        {"prior_correction": 0.5, "prior_floor": 0.9},
        {"correction": 0.5, "floor": 0.9},
    ),
    "corrected-shared": (
        "fedbuff-constant",
        {"prior_correction": 1.0, "shared_prior": 1.0},
        {"correction": 1.0, "shared": 1.0},
    ),
    "corrected-half-shared": (
        "fedbuff-constant",
        {"prior_correction": 0.8, "shared_prior": 0.5},
        {"correction": 0.8, "shared": 0.5},
    ),
    "corrected-probabilities": (
        "fedbuff-constant",
        {"prior_correction": 1.0, "shared_prior": 0.5, "average": "probabilities"},
        {"correction": 1.0, "shared": 0.5, "average": "probabilities"},
    ),
    "current-buffer-alone": ("fedbuff-constant", {"max_teacher_age": 0}, {"max_age": 0}),
    "at-most-three-versions-old": (
        "fedbuff-constant",
        {"max_teacher_age": 3, "prior_correction": 1.0, "shared_prior": 1.0},
        {"max_age": 3, "correction": 1.0, "shared": 1.0},
    ),
    "plain-sgd": ("fedbuff-constant", {"optimizer": "sgd", "clip_norm": 0.5}, {"sgd": True, "nu": 0.5}),
    "over-two-passes": ("ca2fl", {"num_distill_steps": 7}, {}),
    "over-weighted-fedbuff": ("fedbuff-weighted", {}, {}),
    "over-fadas": ("fadas", {}, {}),
    "over-fedac": ("fedac", {}, {}),
}


def rounds_for(name: str, seed: int = 0) -> list[list[oracle.Sent]]:
    return scenarios.draw_rounds(seed, buffer_size=1 if name.startswith("fedasync") else M, fresh=name.startswith("fedavg"))


def echo_pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[FedEcho[Any], oracle.FedEcho]:
    """FedEcho on the linear model, and its oracle with the mini-batches that the package is going to note."""
    inner, settings, same_settings = ECHOES[name]
    inputs = scenarios.unlabeled()
    distiller = scenarios.Recording(distill_lr=0.02, batch_size=5, **settings)
    algorithm, step = METHODS[inner]
    echo = FedEcho(inner=algorithm(), distiller=distiller, student=scenarios.linear_student(inputs, dtype))
    return echo, oracle.FedEcho(step(), oracle.Linear(inputs, CLASSES), distiller.seen, lr=0.02, **same_settings)


def test_scenario_is_hard() -> None:
    """Fresh and stale arrivals, clients twice in a buffer, both sides of hinge, FADAS threshold and FedAC floor."""
    rounds = rounds_for("fedac")
    taus = [t - sent.base for t, arrivals in enumerate(rounds) for sent in arrivals]
    assert len(rounds) == NUM_VERSIONS
    assert {0, 3, 4, 12} <= set(taus)
    assert any(len({sent.client for sent in arrivals}) < len(arrivals) for arrivals in rounds)
    largest = [max(t - sent.base for sent in arrivals) for t, arrivals in enumerate(rounds)]
    assert {tau > 8 for tau in largest} == {True, False}
    versions = oracle.run(METHODS["fedac"][1](), scenarios.first_model(), rounds)
    stale = [
        oracle.agreement(versions, t, sent, 0.1) for t, arrivals in enumerate(rounds) for sent in arrivals if sent.base < t
    ]
    assert {r > 0.1 for r in stale} == {True, False}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_method_matches_oracle(name: str, seed: int) -> None:
    algorithm, step = METHODS[name]
    first, rounds = scenarios.first_model(seed), rounds_for(name, seed)
    models = scenarios.play(algorithm(), first, rounds)
    assert (models[-1].correction is not None) == name.startswith("fedac")
    scenarios.assert_same(models, oracle.run(step(), first, rounds), TOLERANCE)


@pytest.mark.parametrize("name", ECHOES)
def test_fedecho_matches_oracle(name: str) -> None:
    algorithm, step = echo_pair(name)
    first, rounds = scenarios.first_model(), rounds_for(ECHOES[name][0])
    models = scenarios.play(algorithm, first, rounds)
    versions = oracle.run(step, first, rounds)
    scenarios.assert_same(models, versions, ECHO_TOLERANCE)
    inner = oracle.run(step.inner, first, rounds)
    assert np.abs(inner[-1].params - versions[-1].params).max() > 0.1, "distillation must matter, or nothing was compared"


@pytest.mark.parametrize("name", [*METHODS, "echo"])
def test_float32_stays_close(name: str) -> None:
    algorithm, step = (make() for make in METHODS[name]) if name in METHODS else echo_pair("paper", torch.float32)
    first, rounds = scenarios.first_model(), rounds_for(name)
    models = scenarios.play(algorithm, first, rounds, torch.float32)
    assert models[-1].weights.params.dtype == torch.float32
    scenarios.assert_same(models, oracle.run(step, first, rounds), FLOAT32_TOLERANCE)


class ScriptedTransport:
    """Answers open dispatches in a drawn order; client 0 is left waiting, so that its work grows stale. Notes what it sent."""

    def __init__(self) -> None:
        self.open: list[Dispatch] = []
        self.sent: list[oracle.Sent] = []
        self.order = random.Random(3)
        self.rng = np.random.default_rng(4)
        self.now = 0.0

    def send(self, dispatch: Dispatch) -> None:
        self.open.append(dispatch)

    def receive(self) -> ClientUpdate:
        self.now += 1.0
        quick = [d for d in self.open if d.client != 0]
        among = quick if quick and self.order.random() < 0.95 else self.open
        dispatch = self.order.choice(among)
        self.open.remove(dispatch)
        self.sent.append(scenarios.draw_sent(self.rng, dispatch.client, dispatch.model.version))
        return scenarios.update_of(self.sent[-1])


@pytest.mark.parametrize("name", [*METHODS, "echo"])
@scenarios.one_thread()
def test_server_matches_oracle(name: str) -> None:
    """The real server and loop in between: what the server hands on as base, current and staleness is then tested too."""
    algorithm, step = (make() for make in METHODS[name]) if name in METHODS else echo_pair("paper")
    first, transport = scenarios.first_model(), ScriptedTransport()
    models = [scenarios.published(first)]
    server = Server(algorithm=algorithm, model=models[0], num_clients=N, concurrency=M, seed=5)

    def watch(moment: Moment) -> None:
        assert moment.receipt.status == "accepted"
        if moment.step is not None:
            models.append(moment.step.model)

    drive(server, transport, num_versions=NUM_VERSIONS, watch=watch)
    size = 1 if name.startswith("fedasync") else M
    rounds = [transport.sent[k : k + size] for k in range(0, len(transport.sent), size)]
    stalest = max(t - sent.base for t, arrivals in enumerate(rounds) for sent in arrivals)
    assert stalest == 0 if name.startswith("fedavg") else stalest > 8
    scenarios.assert_same(models, oracle.run(step, first, rounds), TOLERANCE if name in METHODS else ECHO_TOLERANCE)

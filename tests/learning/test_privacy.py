"""Clipping and noise, and epsilon against two independent computations."""

import warnings
from dataclasses import replace
from math import exp, sqrt

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from fedecho.algorithms import FedBuff
from fedecho.algorithms.noised import Noised
from fedecho.core.layout import Layout
from fedecho.core.types import Arrival, ClientUpdate, GlobalModel, Weights
from fedecho.learning.privacy import Privacy
from fedecho.runs.privacy_budget import epsilon

SIZE, STATISTICS = 4000, 6
MODEL = GlobalModel(3, Weights(torch.zeros(SIZE), torch.ones(STATISTICS)))
NO_VARIANCE = torch.zeros(STATISTICS, dtype=torch.bool)


def update(scale: float, client: int = 1) -> ClientUpdate:
    rng = torch.Generator().manual_seed(client)
    delta = scale * torch.randn(SIZE, generator=rng) / sqrt(SIZE)
    return ClientUpdate(client, 3, delta, torch.full((STATISTICS,), 1.5), 70, 9, metrics={"train_loss": 1.0})


@pytest.mark.parametrize("scale", [0.01, 50.0])
def test_what_is_sent_is_within_the_norm_and_says_nothing_else(scale: float) -> None:
    quiet = Privacy(clip_norm=2.0, noise_multiplier=1e-9)
    sent = quiet.sent(update(scale), MODEL, 7, NO_VARIANCE)
    joint = torch.cat([sent.delta, sent.buffers - MODEL.weights.buffers])
    whole = torch.cat([update(scale).delta, update(scale).buffers - MODEL.weights.buffers])
    assert float(joint.norm()) == pytest.approx(min(2.0, float(whole.norm())), rel=1e-4)
    torch.testing.assert_close(joint / joint.norm(), whole / whole.norm(), rtol=1e-3, atol=1e-5)
    assert (sent.num_examples, sent.num_steps, sent.metrics, sent.correction) == (1, 1, {}, None)


def test_the_noise_is_gaussian_of_the_promised_size_and_has_an_address() -> None:
    privacy = Privacy(clip_norm=2.0, noise_multiplier=1.5)
    sent = privacy.sent(update(50.0), MODEL, 7, NO_VARIANCE)
    noise = sent.delta - replace(privacy, noise_multiplier=1e-12).sent(update(50.0), MODEL, 7, NO_VARIANCE).delta
    assert float(noise.std()) == pytest.approx(3.0, rel=0.05)
    assert abs(float(noise.mean())) < 0.2
    assert torch.equal(sent.delta, privacy.sent(update(50.0), MODEL, 7, NO_VARIANCE).delta)
    assert not torch.equal(sent.delta, privacy.sent(update(50.0), MODEL, 8, NO_VARIANCE).delta)


def test_variances_stay_at_or_above_zero_and_means_need_not() -> None:
    layout = Layout.of(nn.BatchNorm1d(3))
    variances = layout.variances()
    assert variances.tolist() == [False] * 3 + [True] * 3
    loud = Privacy(clip_norm=2.0, noise_multiplier=50.0)
    buffers = torch.stack([loud.sent(update(1.0), MODEL, seed, variances).buffers for seed in range(10)])
    assert (buffers[:, variances] >= 0).all()
    assert (buffers[:, ~variances] < 0).any()


def test_the_servers_buffer_has_the_noise_exactly_once() -> None:
    privacy = Privacy(clip_norm=1.0, noise_multiplier=3.0, where="server")
    quiet = replace(privacy, noise_multiplier=1e-12)
    steps = []
    for one in (privacy, quiet):
        noised = Noised(inner=FedBuff(buffer_size=4), privacy=one, seed=5, variances=NO_VARIANCE)
        state = noised.init(MODEL)
        for client in range(4):
            assert not noised.ready(state)
            state = noised.receive(state, Arrival(update(9.0, client), MODEL, MODEL))
        advance = noised.advance(state, MODEL)
        steps.append(advance.weights.params)
        assert advance.state.size == 0
    assert float((steps[0] - steps[1]).std()) == pytest.approx(3.0 / 4, rel=0.05)
    assert float(steps[1].norm()) <= 1.0 + 1e-5  # a mean of four that are each within 1


def exact_epsilon(sigma: float, delta: float) -> float:
    """Of one Gaussian mechanism in closed form (Balle and Wang, 2018); k of them are one with sigma / sqrt(k)."""

    def excess(eps: float) -> float:
        return norm.cdf(0.5 / sigma - eps * sigma) - exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma) - delta

    return float(brentq(excess, 0.0, 700.0))


SEQUENCES = [(1.0, 1), (1.0, 20), (2.0, 50), (5.0, 100), (0.8, 3)]


@pytest.mark.parametrize(("sigma", "count"), SEQUENCES)
def test_epsilon_is_the_closed_form_to_one_per_cent(sigma: float, count: int) -> None:
    assert epsilon(sigma, count, 1e-5) == pytest.approx(exact_epsilon(sigma / sqrt(count), 1e-5), rel=0.01)


@pytest.mark.parametrize(("sigma", "count"), SEQUENCES)
def test_epsilon_is_that_of_a_second_library_to_one_per_cent(sigma: float, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from opacus.accountants import PRVAccountant

        other = PRVAccountant()
        other.history = [(sigma, 1.0, count)]
        theirs = other.get_epsilon(1e-5, eps_error=0.005)
    assert epsilon(sigma, count, 1e-5) == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(("sigma", "count"), SEQUENCES)
def test_epsilon_is_that_of_the_librarys_own_accountant(sigma: float, count: int) -> None:
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(sigma), count)
    assert epsilon(sigma, count, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)


@pytest.mark.parametrize("sigma", [1e-3, 0.03, 100.0])
def test_next_to_no_noise_and_a_lot_of_it_are_answered_at_once(sigma: float) -> None:
    assert 0 <= epsilon(sigma, 50, 1e-5) < 1e9


def test_who_sent_nothing_has_lost_nothing() -> None:
    assert epsilon(1.0, 0, 1e-5) == 0.0
    assert np.isfinite(epsilon(1.0, 1, 1e-5))

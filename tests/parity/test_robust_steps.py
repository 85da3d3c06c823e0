"""Robust steps against NumPy, and FedBuff and FADAS with them."""

from typing import Any

import numpy as np
import oracle
import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import trim_mean

from fedecho.algorithms import FADAS, FedBuff
from fedecho.algorithms.buffer import combined, krum
from fedecho.storage.checkpoint import decode, encode

DELTAS = st.integers(1, 9).flatmap(lambda num: arrays(np.float64, (num, 4), elements=st.floats(-9, 9)))


def krum_by_hand(deltas: np.ndarray) -> set[int]:
    """All updates with the least score: ties may go either way."""
    num = len(deltas)
    others = num - (num - 3) // 2 - 2
    scores = [sorted(((deltas - one) ** 2).sum(axis=1))[1 : others + 1] for one in deltas]
    totals = np.array([sum(score) for score in scores])
    return set(np.flatnonzero(totals <= totals.min() + 1e-9).tolist())


@given(DELTAS)
@settings(max_examples=100, deadline=None)
def test_krum_is_the_update_nearest_to_its_neighbours(deltas: np.ndarray) -> None:
    chosen = krum(torch.from_numpy(deltas))
    assert chosen == 0 if len(deltas) < 3 else chosen in krum_by_hand(deltas)


@given(DELTAS)
@settings(max_examples=100, deadline=None)
def test_the_other_rules_are_numpys(deltas: np.ndarray) -> None:
    both = (torch.from_numpy(deltas), torch.from_numpy(deltas[:, :2]))
    norms = np.linalg.norm(deltas, axis=1)
    bound = np.median(norms)
    factor = np.array([min(1.0, bound / norm) if norm else 1.0 for norm in norms])
    wanted = {
        "median": (np.median(deltas, axis=0), np.median(deltas[:, :2], axis=0)),
        "trimmed": (trim_mean(deltas, 0.2, axis=0), trim_mean(deltas[:, :2], 0.2, axis=0)),
        "clipped": ((deltas * factor[:, None]).mean(axis=0), np.median(deltas[:, :2], axis=0)),
    }
    for rule, (delta, statistics) in wanted.items():
        ours = combined(*both, rule)  # type: ignore[arg-type]
        np.testing.assert_allclose(ours[0].numpy(), delta, atol=1e-9)
        np.testing.assert_allclose(ours[1].numpy(), statistics, atol=1e-9)


def rounds(num: int, *, attacker: float) -> list[list[oracle.Sent]]:
    rng = np.random.default_rng(0)

    def sent(client: int, version: int, scale: float) -> oracle.Sent:
        delta = scale * (1 + 0.1 * rng.normal(size=scenarios.NUM_PARAMS))
        return oracle.Sent(client, version, delta, np.zeros(scenarios.FEATURES), 0 * delta)

    return [[sent(client, t, attacker if client == 2 else 1.0) for client in range(5)] for t in range(num)]


FIRST = oracle.Model(np.zeros(scenarios.NUM_PARAMS), np.zeros(scenarios.FEATURES), np.zeros(scenarios.NUM_PARAMS))


@pytest.mark.parametrize("rule", ["clipped", "median", "trimmed", "krum"])
def test_one_attacker_in_five_moves_fedbuff_little(rule: Any) -> None:
    plain, robust = FedBuff(buffer_size=5), FedBuff(buffer_size=5, combine=rule)
    honest = float(scenarios.play(plain, FIRST, rounds(3, attacker=1.0))[-1].weights.params.mean())
    ruined = float(scenarios.play(plain, FIRST, rounds(3, attacker=-50.0))[-1].weights.params.mean())
    saved = float(scenarios.play(robust, FIRST, rounds(3, attacker=-50.0))[-1].weights.params.mean())
    assert ruined < 0 < honest
    assert saved == pytest.approx(honest, rel=0.5 if rule == "clipped" else 0.1)


def test_fadas_with_a_robust_step_takes_its_moments_of_the_median() -> None:
    plain, robust = FADAS(buffer_size=1, server_lr=0.1), FADAS(buffer_size=5, server_lr=0.1, combine="median")
    given_ = rounds(4, attacker=-50.0)
    medians = [
        [oracle.Sent(0, t, np.median([one.delta for one in batch], axis=0), batch[0].buffers, batch[0].correction)]
        for t, batch in enumerate(given_)
    ]
    ours, theirs = scenarios.play(robust, FIRST, given_)[-1], scenarios.play(plain, FIRST, medians)[-1]
    torch.testing.assert_close(ours.weights.params, theirs.weights.params)


def test_a_kept_buffer_survives_a_checkpoint() -> None:
    algorithm = FedBuff(buffer_size=3, combine="median")
    model = scenarios.play(algorithm, FIRST, [])[0]
    state = algorithm.init(model)
    state = state.keep(torch.ones_like(model.weights.params), model.weights.buffers, 1.0, "median")
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(state, tensors)
    again = decode(tree, tensors, algorithm.init(model))
    assert again.size == 1
    assert torch.equal(again.deltas[0], state.deltas[0])
    assert torch.equal(again.statistics[0], state.statistics[0])


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="combine must be one of mean, clipped, median, trimmed, krum, got 'mode'"):
        FedBuff(buffer_size=1, combine="mode")  # type: ignore[arg-type]

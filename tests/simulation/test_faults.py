"""Dropouts and spells against their distributions."""

from math import log, sqrt

import numpy as np
import pytest

from fedecho.simulation.faults import Faults


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_the_share_of_dropouts_is_as_told(share: float) -> None:
    n = 5000
    lost = sum(Faults(dropout=share).drop_after(10.0, 0, number) is not None for number in range(n))
    assert abs(lost / n - share) < 4 * sqrt(share * (1 - share) / n)


def test_nobody_drops_out_by_default() -> None:
    assert all(Faults().drop_after(10.0, 0, number) is None for number in range(1000))
    assert not Faults().has_spells


def test_the_moment_of_a_dropout_is_uniform_over_the_runtime() -> None:
    found = [Faults(dropout=0.5).drop_after(8.0, 1, number) for number in range(6000)]
    moments = np.sort([moment for moment in found if moment is not None]) / 8.0
    assert moments[0] >= 0
    assert moments[-1] < 1
    assert np.abs(moments - np.linspace(0, 1, len(moments))).max() < 1.95 / sqrt(len(moments))


def test_more_dropouts_include_the_fewer() -> None:
    """Each dispatch has one draw, so that a higher rate loses the same jobs and some more."""
    few = {number for number in range(500) if Faults(dropout=0.1).drop_after(1.0, 0, number) is not None}
    many = {number for number in range(500) if Faults(dropout=0.4).drop_after(1.0, 0, number) is not None}
    assert few < many


@pytest.mark.parametrize(("parity", "mean"), [(0, 40.0), (1, 5.0)])
def test_spells_are_exponential_with_their_own_mean(parity: int, mean: float) -> None:
    """Even spells are available ones. 1 - exp(-x / mean) of an exponential draw is uniform."""
    faults = Faults(available_s=40.0, unavailable_s=5.0)
    assert faults.has_spells
    draws = np.sort([faults.spell(0, client, 2 * k + parity) for client in range(50) for k in range(40)])
    assert draws[0] >= 0
    assert np.isfinite(draws).all()
    standard = 1 - np.exp(-draws / mean)
    assert np.abs(standard - np.linspace(0, 1, len(draws))).max() < 1.95 / sqrt(len(draws))
    assert abs(np.median(draws) - mean * log(2)) < 0.1 * mean


def test_a_spell_is_a_pure_function_of_client_and_number() -> None:
    faults = Faults(available_s=1.0, unavailable_s=1.0)
    lengths = {(client, number): faults.spell(0, client, number) for client in range(5) for number in range(5)}
    assert len(set(lengths.values())) == 25
    assert {key: faults.spell(0, *key) for key in reversed(lengths)} == lengths
    assert faults.spell(1, 0, 0) != lengths[0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dropout": -0.1}, r"faults.dropout must be at least 0 and below 1, got -0.1"),
        ({"dropout": 1.0}, r"faults.dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": float("nan")}, r"faults.dropout must be at least 0 and below 1, got nan"),
        ({"available_s": 5.0}, r"must be given together"),
        ({"unavailable_s": 5.0}, r"must be given together"),
        ({"available_s": 0.0, "unavailable_s": 5.0}, r"faults.available_s must be at least 0.001, got 0.0"),
        ({"available_s": 5.0, "unavailable_s": -1.0}, r"faults.unavailable_s must be at least 0.001, got -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Faults(**wrong)

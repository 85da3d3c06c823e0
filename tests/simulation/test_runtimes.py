"""Runtimes and their classes against counts, closed forms and plain sorting."""

from collections import Counter
from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.randomness import uniform
from fedecho.simulation.runtimes import LONG, MEDIUM, PROFILES, SHORT, ClassRuntimes, Runtimes

RANGES_S = {
    ("large", SHORT): (10, 20),
    ("large", MEDIUM): (30, 50),
    ("large", LONG): (500, 800),
    ("mild", SHORT): (10, 20),
    ("mild", MEDIUM): (30, 50),
    ("mild", LONG): (100, 200),
    ("equal", SHORT): (10, 10),
    ("equal", MEDIUM): (10, 10),
    ("equal", LONG): (10, 10),
}


def classes(runtimes: Runtimes, sizes: list[int], seed: int = 0) -> list[str]:
    assigned = runtimes.assign(sizes, seed)
    return [assigned.class_of(client) for client in range(len(sizes))]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0, 100.0]))
@settings(max_examples=50, deadline=None)
def test_a_tenth_is_long_and_29_percent_are_medium(sizes: list[int], seed: int, gamma: float) -> None:
    n = len(sizes)
    counts = Counter(classes(Runtimes(runtime_gamma=gamma), sizes, seed))
    assert counts[LONG] == n // 10
    assert abs(counts[MEDIUM] - Fraction(29, 100) * n) <= Fraction(1, 2)
    assert counts[SHORT] == n - counts[LONG] - counts[MEDIUM]


def test_counts_of_the_papers_federations() -> None:
    assert Counter(classes(Runtimes(), list(range(50)))) == {LONG: 5, MEDIUM: 14, SHORT: 31}
    assert Counter(classes(Runtimes(), list(range(10)))) == {LONG: 1, MEDIUM: 3, SHORT: 6}
    assert classes(Runtimes(), [5]) == [SHORT]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.0, 0.0), (0, 0)), ((1.0, 0.0), (7, 0)), ((0.0, 1.0), (0, 7)), ((0.5, 0.5), (3, 4)), ((0.3, 0.7), (2, 5))],
)
def test_other_shares_fill_up_to_all_clients(shares: tuple[float, float], expected: tuple[int, int]) -> None:
    found = Counter(classes(Runtimes(long_share=shares[0], medium_share=shares[1]), [1] * 7))
    assert (found[LONG], found[MEDIUM]) == expected


@given(st.permutations(list(range(1, 31))), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_gamma_0_is_by_size_alone(sizes: list[int], seed: int) -> None:
    """30 clients: the 3 largest are long, the next 9 medium."""
    found = classes(Runtimes(runtime_gamma=0.0), sizes, seed)
    expected = [LONG if size > 27 else MEDIUM if size > 18 else SHORT for size in sizes]
    assert found == expected


def test_by_order_the_first_clients_are_the_slowest_whatever_their_sizes() -> None:
    expected = ["long"] * 2 + ["medium"] * 6 + ["short"] * 12
    for sizes in (list(range(20)), [5] * 20, list(range(20, 0, -1))):
        assert classes(Runtimes(rule="order"), sizes, seed=3) == expected


def long_sizes(gamma: float, num_seeds: int = 400) -> np.ndarray:
    """The sizes, 0 to 19, of all that were long over many seeds (2 a seed)."""
    sizes = np.random.default_rng(5).permutation(20)
    found = [classes(Runtimes(runtime_gamma=gamma), sizes.tolist(), seed) for seed in range(num_seeds)]
    return np.concatenate([sizes[np.array(each) == LONG] for each in found])


def test_a_large_gamma_is_independent_of_size() -> None:
    """The mean size of the long ones is that of all, 9.5, within four standard errors."""
    found = long_sizes(1e6)
    assert len(found) == 800
    assert abs(found.mean() - 9.5) < 4 * sqrt((20**2 - 1) / 12 / 800)
    assert len(set(found.tolist())) == 20


def test_the_larger_gamma_the_less_size_counts() -> None:
    means = [long_sizes(gamma, 100).mean() for gamma in (0.0, 0.5, 2.0, 50.0)]
    assert means[0] == 18.5
    assert means == sorted(means, reverse=True)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=40), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_classes_follow_the_score(sizes: list[int], seed: int) -> None:
    """score = rank / (N - 1) + gamma u, ranked by counting; equal sizes in the order of the clients."""
    n, gamma = len(sizes), 1.5
    rank = [sum((sizes[o], o) < (sizes[c], c) for o in range(n)) / (n - 1) for c in range(n)]
    score = [rank[c] + gamma * uniform(seed, "runtime class", c) for c in range(n)]
    found = classes(Runtimes(runtime_gamma=gamma), sizes, seed)
    speed = {SHORT: 0, MEDIUM: 1, LONG: 2}
    for one in range(n):
        for other in range(n):
            if score[one] > score[other]:
                assert speed[found[one]] >= speed[found[other]]


@pytest.mark.parametrize(("profile", "name"), RANGES_S)
def test_draws_are_uniform_over_the_range_of_the_class(profile: str, name: str) -> None:
    low, high = RANGES_S[profile, name]
    runtimes = ClassRuntimes(PROFILES[profile], [name], seed=3)
    draws = np.array([runtimes.draw(0, number) for number in range(2000)])
    assert low <= draws.min()
    assert draws.max() <= high
    if high > low:
        standard = np.sort((draws - low) / (high - low))
        assert np.abs(standard - np.linspace(0, 1, 2000)).max() < 1.95 / sqrt(2000)


def test_a_draw_belongs_to_the_dispatch() -> None:
    runtimes = ClassRuntimes(PROFILES["large"], [SHORT, SHORT, LONG], seed=0)
    draws = [runtimes.draw(0, number) for number in range(50)]
    assert len(set(draws)) == 50, "drawn anew for every dispatch"
    assert [runtimes.draw(0, number) for number in range(50)] == draws
    assert [runtimes.draw(1, number) for number in range(50)] == draws
    assert ClassRuntimes(PROFILES["large"], [SHORT], seed=1).draw(0, 0) != draws[0]


def erlang(shape: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Density and distribution function of Gamma(shape) for whole shapes."""
    terms = [np.exp(-x)]
    for j in range(1, shape + 1):
        terms.append(terms[-1] * x / j)
    return terms[shape - 1], 1 - sum(terms[:shape])


@pytest.mark.parametrize("spread", [1, 2])
def test_fadas_classes_have_the_shares_of_the_largest_of_three_gammas(spread: int) -> None:
    """argmax of Dirichlet(3s, 2s, s) is that of three gamma variables: P(i wins) = integral of f_i times the others' F."""
    x = np.linspace(0, 60, 200_001)
    parts = [erlang(shape * spread, x) for shape in (3, 2, 1)]
    wins = [parts[i][0] * np.prod([parts[j][1] for j in range(3) if j != i], axis=0) for i in range(3)]
    shares = [float(np.trapezoid(win, x)) for win in wins]
    assert abs(sum(shares) - 1) < 1e-6
    n = 3000
    found = Counter(classes(Runtimes(rule="fadas", spread=float(spread)), list(range(n))))
    for name, share in zip((SHORT, MEDIUM, LONG), shares, strict=True):
        assert abs(found[name] / n - share) < 4 * sqrt(share * (1 - share) / n), name


def test_fadas_classes_do_not_depend_on_size() -> None:
    assert classes(Runtimes(rule="fadas"), list(range(40)), 2) == classes(Runtimes(rule="fadas"), [7] * 40, 2)
    assert classes(Runtimes(rule="fadas"), [7] * 40, 2) != classes(Runtimes(rule="fadas"), [7] * 40, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profile": "huge"}, r"runtimes.profile must be 'large', 'mild' or 'equal', got 'huge'"),
        ({"rule": "age"}, r"runtimes.rule must be 'size', 'fadas' or 'order', got 'age'"),
        ({"runtime_gamma": -0.1}, r"runtime_gamma must be at least 0, got -0.1"),
        ({"long_share": -0.1}, r"runtimes.long_share must be between 0 and 1, got -0.1"),
        ({"long_share": 0.8, "medium_share": 0.3}, r"must add up to at most 1, got 0.8 and 0.3"),
        ({"spread": 0.0}, r"runtimes.spread must be above 0, got 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Runtimes(**wrong)  # type: ignore[arg-type]

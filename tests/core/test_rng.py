"""Addressed draws: stable, independent of each other and of the right distribution."""

from hashlib import blake2b
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.randomness import below, derive, global_rng, numpy_rng, torch_rng, uniform

GOLDEN = [
    (0, (), 7210762507766007076),
    (0, ("select", 0), 3110578769790577405),
    (0, ("select", 1), 5306359191927807415),
    (1, ("select", 0), 8908379653453005141),
    (0, ("job", 17), 445233935025827840),
    (7, ("runtime class", 3), 1499797564836118340),
    (2**62, ("spell", 5, 2), 5992478711468873276),
    (-1, ("x",), 498587912623588202),
]
"""Written down once. If they change, every published run of the past changes with them."""

parts = st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=8))
addresses = st.tuples(st.integers(0, 2**64), st.lists(parts, max_size=4).map(tuple))


@pytest.mark.parametrize(("seed", "address", "expected"), GOLDEN)
def test_streams_are_those_of_the_first_release(seed: int, address: tuple[int | str, ...], expected: int) -> None:
    assert derive(seed, *address) == expected


def test_derived_draws_are_those_of_the_first_release() -> None:
    assert [uniform(3, "runtime", k) for k in range(3)] == [0.632588985411885, 0.7871267402799901, 0.04560526193477299]
    assert [below(50, 3, "select", k) for k in range(6)] == [8, 17, 44, 43, 18, 15]
    assert numpy_rng(0, "partition", 0).integers(0, 1000, 5).tolist() == [615, 377, 857, 67, 168]
    assert numpy_rng(0, "partition", 0).permutation(6).tolist() == [4, 0, 1, 5, 3, 2]
    assert torch.randperm(8, generator=torch_rng(5, "shuffle")).tolist() == [7, 5, 0, 4, 6, 1, 2, 3]


@given(addresses, addresses)
@settings(max_examples=50, deadline=None)
def test_only_equal_addresses_have_equal_numbers(
    one: tuple[int, tuple[int | str, ...]], other: tuple[int, tuple[int | str, ...]]
) -> None:
    same = derive(one[0], *one[1]) == derive(other[0], *other[1])
    assert same == (one == other)
    assert 0 <= derive(one[0], *one[1]) < 2**63


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "a", 1), (0, "a", "1")),
        ((0, "ab", "c"), (0, "a", "bc")),
        ((0, "a', 'b"), (0, "a", "b")),
        ((1, 2), (12,)),
        ((0, 1, 2), (0, 2, 1)),
        ((0,), (0, 0)),
        ((0, -1), (0, 1)),
    ],
)
def test_addresses_that_look_alike_are_apart(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert derive(*one) != derive(*other)


def test_a_number_is_a_number_of_whatever_type() -> None:
    assert derive(np.int64(3), "job", np.int32(5)) == derive(3, "job", 5)


def test_a_draw_consumes_nothing() -> None:
    torch.manual_seed(11)
    np_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    forward = [uniform(0, "x", k) for k in range(10)]
    numpy_rng(0, "y").random()
    torch.rand(3, generator=torch_rng(0, "z"))
    assert [uniform(0, "x", k) for k in reversed(range(10))] == forward[::-1]
    assert np.array_equal(np.random.get_state()[1], np_state)
    assert torch.equal(torch.get_rng_state(), torch_state)


def kolmogorov_smirnov(draws: np.ndarray) -> float:
    """sqrt(n) times the largest distance from the distribution function of U[0, 1)."""
    ordered, n = np.sort(draws), len(draws)
    above = np.arange(1, n + 1) / n - ordered
    under = ordered - np.arange(n) / n
    return float(sqrt(n) * max(above.max(), under.max()))


@pytest.mark.parametrize("name", ["runtime", "dropout", "spell"])
def test_uniform_is_uniform(name: str) -> None:
    """The critical value of a share of .001 is 1.95; the seed is fixed."""
    draws = np.array([uniform(0, name, k) for k in range(5000)])
    assert (draws >= 0).all()
    assert (draws < 1).all()
    assert kolmogorov_smirnov(draws) < 1.95


def test_uniform_across_seeds_is_uniform() -> None:
    draws = np.array([uniform(seed, "runtime", 0) for seed in range(5000)])
    assert kolmogorov_smirnov(draws) < 1.95


def test_neighbouring_addresses_are_uncorrelated() -> None:
    """Within 4 standard errors of 0: of consecutive numbers, of two names at one number, of two seeds at one address."""
    n = 5000
    draws = np.array([uniform(0, "a", k) for k in range(n + 1)])
    others = np.array([uniform(0, "b", k) for k in range(n)])
    seeds = np.array([uniform(1, "a", k) for k in range(n)])
    for left, right in ((draws[:-1], draws[1:]), (draws[:-1], others), (draws[:-1], seeds)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / sqrt(n)


def test_uniform_never_reaches_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of the 63-bit numbers still gives less than 1, the smallest exactly 0."""
    monkeypatch.setattr("fedecho.core.randomness.derive", lambda seed, *address: 2**63 - 1)
    assert uniform(0) == 1 - 2**-53
    monkeypatch.setattr("fedecho.core.randomness.derive", lambda seed, *address: 0)
    assert uniform(0) == 0.0


@pytest.mark.parametrize(("bound", "critical"), [(2, 10.8), (7, 22.5), (50, 85.4)])
def test_below_is_uniform(bound: int, critical: float) -> None:
    """Chi-square with bound - 1 degrees of freedom at a share of .001."""
    n = 200 * bound
    counts = np.bincount([below(bound, 4, "select", k) for k in range(n)], minlength=bound)
    assert len(counts) == bound
    assert ((counts - 200.0) ** 2 / 200).sum() < critical


def test_generators_at_one_address_are_equal_and_fresh() -> None:
    assert np.array_equal(numpy_rng(1, "p").random(4), numpy_rng(1, "p").random(4))
    assert torch.equal(torch.rand(4, generator=torch_rng(1, "p")), torch.rand(4, generator=torch_rng(1, "p")))
    assert not np.array_equal(numpy_rng(1, "p").random(4), numpy_rng(1, "q").random(4))


def test_torchs_own_generator_draws_from_the_address_inside_and_does_not_move_outside() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with global_rng(torch.device("cpu"), 0, "module"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with global_rng(torch.device("cpu"), 0, "module"):
        assert torch.equal(torch.rand(3), first)
    torch.manual_seed(1)
    with global_rng(torch.device("cpu"), 0, "other"):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), expected)


@given(st.integers(-(2**70), 2**70), st.text(max_size=12), st.integers(-(2**70), 2**70))
@settings(max_examples=100, deadline=None)
def test_the_short_way_is_the_hash_of_the_whole_address(seed: int, name: str, number: int) -> None:
    """Nearly all draws have a name and a number, and their prefix is hashed once."""
    digest = blake2b(repr((seed, name, number)).encode(), digest_size=8).digest()
    expected = int.from_bytes(digest, "big") >> 1
    assert derive(seed, name, number) == expected
    assert derive(seed, name, number) == expected  # and again, from what is kept of the first
    assert derive(0, name, np.int64(7)) == derive(0, name, 7)
    assert derive(True, name, True) == derive(1, name, 1)

"""Every row belongs to exactly one client, no client is empty, and shares follow their distribution."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.tasks import partition
from fedecho.tasks.partition import (
    PARTITIONERS,
    DirichletPartitioner,
    DrawnPartitioner,
    HeldClassesPartitioner,
    IidPartitioner,
    ShardPartitioner,
)

PARTITIONS: list[Any] = [
    DirichletPartitioner(alpha=1.0),
    DirichletPartitioner(alpha=50.0, min_partition_size=2),
    IidPartitioner(),
    ShardPartitioner(),
    ShardPartitioner(num_shards_per_partition=1),
]
labels_lists = st.lists(st.integers(0, 4), min_size=80, max_size=200)


def rows_of(parts: list[np.ndarray]) -> list[int]:
    return sorted(np.concatenate(parts).tolist())


@pytest.mark.parametrize("partitioner", PARTITIONS, ids=repr)
@given(labels=labels_lists, num_clients=st.integers(1, 8), seed=st.integers(0, 2**40))
@settings(max_examples=20, deadline=None)
def test_every_row_is_somebodys_and_nobody_is_empty(partitioner: Any, labels: list[int], num_clients: int, seed: int) -> None:
    parts = partitioner.split(np.array(labels), num_clients, seed)
    assert len(parts) == num_clients
    assert rows_of(parts) == list(range(len(labels)))
    assert min(map(len, parts)) >= getattr(partitioner, "min_partition_size", 1)
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all(), "rows are in order"
    again = partitioner.split(np.array(labels), num_clients, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


@pytest.mark.parametrize("partitioner", PARTITIONS, ids=repr)
def test_another_seed_is_another_split(partitioner: Any) -> None:
    labels = np.arange(200) % 5
    one, other = (partitioner.split(labels, 4, seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_moments_of_the_distribution(alpha: float) -> None:
    """A client's share of a class is Beta(alpha, (N-1) alpha): mean 1/N, variance (1/N)(1-1/N) / (N alpha + 1)."""
    num_clients, per_class, num_classes = 5, 1000, 300
    labels = np.repeat(np.arange(num_classes), per_class)
    parts = DirichletPartitioner(alpha=alpha).split(labels, num_clients, seed=0)
    shares = np.stack([np.bincount(labels[part], minlength=num_classes) / per_class for part in parts])
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)
    mean, variance = 1 / num_clients, (1 / num_clients) * (1 - 1 / num_clients) / (num_clients * alpha + 1)
    assert np.abs(shares.mean(axis=1) - mean).max() < 4 * np.sqrt(variance / num_classes)
    assert shares.var() == pytest.approx(variance, rel=0.15)
    together = np.mean(shares[0] * shares[1]) - mean**2
    assert together == pytest.approx(-variance / (num_clients - 1), abs=4 * variance / np.sqrt(num_classes))


def test_classes_are_cut_at_the_floor_of_the_summed_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows in shares of .26, .30 and .44: cuts at floor(2.6) and floor(5.6)."""

    class Fixed:
        def permutation(self, rows: Any) -> np.ndarray:
            return np.asarray(rows)[::-1]

        def dirichlet(self, alphas: np.ndarray) -> np.ndarray:
            assert alphas.tolist() == [0.5, 0.5, 0.5]
            return np.array([0.26, 0.30, 0.44])

    monkeypatch.setattr(partition, "numpy_rng", lambda *address: Fixed())
    parts = DirichletPartitioner(alpha=0.5).split(np.zeros(10), 3, 0)
    assert [part.tolist() for part in parts] == [[8, 9], [5, 6, 7], [0, 1, 2, 3, 4]]


def test_a_small_alpha_gives_clients_few_classes() -> None:
    labels = np.repeat(np.arange(10), 500)

    def classes_seen(alpha: float) -> float:
        parts = DirichletPartitioner(alpha=alpha).split(labels, 10, 0)
        counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
        return float((counts > 0.05 * counts.sum(axis=1, keepdims=True)).sum(axis=1).mean())

    assert classes_seen(0.05) < 4
    assert classes_seen(100.0) == 10


def test_a_draw_that_leaves_somebody_empty_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = partition.numpy_rng
    monkeypatch.setattr(partition, "numpy_rng", lambda *address: asked.append(address) or real(*address))
    parts = DirichletPartitioner(alpha=0.1, min_partition_size=3).split(np.arange(60) % 3, 8, seed=1)
    assert min(map(len, parts)) >= 3
    assert len(asked) > 1
    assert asked == [(1, "partition", draw) for draw in range(len(asked))]


def test_a_split_that_cannot_be_found_is_given_up_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_DRAWS", 5)
    with pytest.raises(ValueError, match=r"no Dirichlet\(0.001\) split of 30 examples .* in any of 5 draws: use fewer clients"):
        DirichletPartitioner(alpha=0.001).split(np.zeros(30), 20, 0)


def test_iid_parts_are_of_equal_size_and_mixed() -> None:
    labels = np.repeat(np.arange(4), 253)
    parts = IidPartitioner().split(labels, 5, 0)
    assert sorted(map(len, parts)) == [202, 202, 202, 203, 203]
    for part in parts:
        counts = np.bincount(labels[part], minlength=4)
        assert np.abs(counts - 50.6).max() < 4 * np.sqrt(202 * 3 / 16)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_are_equal_pieces_of_the_rows_sorted_by_label(shards: int) -> None:
    """100 rows of each of ten classes over ten clients: a client sees at most two classes a shard."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    parts = ShardPartitioner(num_shards_per_partition=shards).split(labels, 10, 0)
    assert max(map(len, parts)) - min(map(len, parts)) <= shards
    for part in parts:
        assert len(set(labels[part].tolist())) <= 2 * shards
    if shards == 1:
        assert sorted(labels[part][0] for part in parts) == list(range(10))
        assert all(len(set(labels[part].tolist())) == 1 for part in parts)


def test_names_are_those_of_the_table() -> None:
    known = {"dirichlet": DirichletPartitioner, "iid": IidPartitioner, "shards": ShardPartitioner, "drawn": DrawnPartitioner}
    assert known | {"held": HeldClassesPartitioner} == PARTITIONERS


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("seed", [0, 7])
def test_holders_have_their_share_of_the_held_classes_and_nothing_else(share: float, seed: int) -> None:
    """The last two classes: a share of each, divided evenly between the two holders. All other rows belong to the others."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(10), 80))
    parts = HeldClassesPartitioner(num_held=2, num_holders=2, held_share=share).split(labels, 10, seed)
    assert rows_of(parts) == list(range(800))
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    assert counts[:2, :8].sum() == 0
    assert (counts[:2, 8:].sum(axis=0) == 80 * share).all()
    assert np.ptp(counts[:2].sum(axis=1)) <= 1
    assert (counts[2:, 8:].sum(axis=0) == 80 * (1 - share)).all()
    assert (np.count_nonzero(counts[2:], axis=1) <= 4).all(), "two shards have at most four classes"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DirichletPartitioner(alpha=0.0), r"dirichlet alpha must be above 0, got 0.0"),
        (lambda: DirichletPartitioner(alpha=float("nan")), r"dirichlet alpha must be above 0, got nan"),
        (lambda: DirichletPartitioner(alpha=1.0, min_partition_size=0), r"min_partition_size must be at least 1, got 0"),
        (lambda: HeldClassesPartitioner(held_share=0.0), r"partition.held_share must be above 0 and at most 1, got 0.0"),
        (
            lambda: HeldClassesPartitioner(num_held=2).split(np.arange(40) % 2, 5, 0),
            r"partition.num_held is 2 of 2 classes and partition.num_holders is 2 of 5 clients: other clients need at least one",
        ),
        (lambda: HeldClassesPartitioner(num_holders=9).split(np.arange(40) % 4, 9, 0), r"num_holders is 9 of 9 clients"),
        (lambda: ShardPartitioner(num_shards_per_partition=0), r"num_shards_per_partition must be at least 1, got 0"),
        (lambda: IidPartitioner().split(np.zeros(5), 0, 0), r"num_clients must be at least 1, got 0"),
        (lambda: IidPartitioner().split(np.zeros(5), 6, 0), r"5 examples cannot fill 6 parts of at least 1"),
        (lambda: ShardPartitioner().split(np.zeros(5), 3, 0), r"5 examples cannot fill 6 parts of at least 1"),
        (lambda: DirichletPartitioner(alpha=1.0).split(np.zeros(5), 6, 0), r"5 examples cannot fill 6 parts"),
        (
            lambda: DirichletPartitioner(alpha=1.0, min_partition_size=3).split(np.zeros(5), 2, 0),
            r"5 examples cannot fill 2 parts of at least 3",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

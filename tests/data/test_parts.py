"""Rows of each client, stored or drawn on demand, against plain lists."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.randomness import numpy_rng
from fedecho.tasks.partition import (
    DirichletPartitioner,
    DrawnPartitioner,
    IidPartitioner,
    ShardPartitioner,
    StoredParts,
    as_parts,
)

LABELS = np.random.default_rng(0).integers(0, 4, 300)


def cut_dirichlet(labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    """Lists of arrays, cut one by one; the first draw that leaves nobody empty."""
    for draw in range(1000):
        rng, pieces = numpy_rng(seed, "partition", draw), [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_clients, 0.7))
            cuts = np.floor(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
            for client, piece in enumerate(np.split(rows, cuts)):
                pieces[client].append(piece)
        parts = [np.sort(np.concatenate(mine)) for mine in pieces]
        if min(map(len, parts)) >= 1:
            return parts
    raise AssertionError


def cut_iid(labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    rows = numpy_rng(seed, "partition").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(rows, num_clients)]


def cut_shards(labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    rng = numpy_rng(seed, "partition")
    shuffled = rng.permutation(len(labels))
    shards = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], 2 * num_clients)
    order = rng.permutation(2 * num_clients).reshape(num_clients, 2)
    return [np.sort(np.concatenate([shards[shard] for shard in mine])) for mine in order]


@pytest.mark.parametrize(
    ("partitioner", "cut"),
    [(DirichletPartitioner(alpha=0.7), cut_dirichlet), (IidPartitioner(), cut_iid), (ShardPartitioner(), cut_shards)],
)
@given(num_clients=st.integers(1, 12), seed=st.integers(0, 2**40))
@settings(max_examples=20, deadline=None)
def test_parts_are_those_of_plain_cuts(partitioner: Any, cut: Any, num_clients: int, seed: int) -> None:
    parts, expected = partitioner.split(LABELS, num_clients, seed), cut(LABELS, num_clients, seed)
    assert len(parts) == num_clients
    for client in range(num_clients):
        assert parts[client].tolist() == expected[client].tolist()
        assert parts.size(client) == len(expected[client])
    assert parts[-1].tolist() == expected[-1].tolist()


def test_a_users_own_list_is_taken_as_it_is() -> None:
    own = [np.array([5, 1]), np.array([0, 2, 3])]
    parts = as_parts(own)
    assert [parts[client].tolist() for client in range(2)] == [[5, 1], [0, 2, 3]]
    assert [parts.size(client) for client in range(2)] == [2, 3]
    held = StoredParts.of(np.array([1, 0, 1]), 2)
    assert as_parts(held) is held
    with pytest.raises(IndexError):
        held[2]


@given(st.integers(0, 10**7 - 1), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_a_drawn_client_is_its_own_whoever_else_there_is(client: int, seed: int) -> None:
    """The same rows every time and at any number of clients, as many as it said, all of them there."""
    partitioner = DrawnPartitioner(alpha=0.3, min_examples=5, max_examples=9)
    many = partitioner.split(LABELS, 10**7, seed)
    rows = many[client]
    assert 5 <= len(rows) == many.size(client) <= 9
    assert rows.tolist() == sorted(rows.tolist())
    assert rows.min() >= 0
    assert rows.max() < len(LABELS)
    assert rows.tolist() == partitioner.split(LABELS, client + 1, seed)[client].tolist()


def test_drawn_clients_are_of_all_sizes_and_all_classes_and_the_smaller_alpha_the_fewer() -> None:
    def classes(alpha: float) -> float:
        parts = DrawnPartitioner(alpha=alpha, min_examples=30, max_examples=40).split(LABELS, 200, 0)
        return float(np.mean([len(set(LABELS[parts[client]].tolist())) for client in range(200)]))

    assert classes(0.05) < 2 < 3.8 < classes(50.0) <= 4
    parts = DrawnPartitioner(min_examples=3, max_examples=6).split(LABELS, 400, 1)
    sizes = np.bincount([parts.size(client) for client in range(400)], minlength=7)[3:]
    assert (np.abs(sizes - 100) < 5 * np.sqrt(75)).all()
    seen = np.bincount(LABELS[np.concatenate([parts[client] for client in range(400)])], minlength=4)
    assert (seen > 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, r"partition.alpha must be above 0, got 0.0"),
        ({"min_examples": 0}, r"partition.min_examples must be at least 1, got 0"),
        ({"min_examples": 9, "max_examples": 8}, r"got 9 and 8"),
    ],
)
def test_a_drawn_partition_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DrawnPartitioner(**settings)

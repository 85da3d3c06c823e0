"""Split labelled examples over clients, without an object per client. Names follow flwr-datasets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedecho.core.randomness import derive, numpy_rng
from fedecho.core.ranges import Range, at_least, check_ranges, share

Indices = NDArray[np.int64]


@runtime_checkable
class Parts(Protocol):
    """The rows of each client, in ascending order."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> Indices: ...

    def size(self, client: int) -> int:
        """Return the number of rows of a client in constant time."""


class StoredParts:
    """The rows of all clients, concatenated; client i's are ``rows[starts[i]:starts[i + 1]]``."""

    def __init__(self, rows: Indices, starts: Indices) -> None:
        self._rows, self._starts = rows, starts

    @classmethod
    def of(cls, clients: Indices, num_clients: int) -> "StoredParts":
        """Build the parts from the client of each row."""
        counts = np.bincount(clients, minlength=num_clients)
        rows = np.argsort(clients, kind="stable").astype(np.int64, copy=False)
        return cls(rows, np.concatenate([[0], counts.cumsum()]))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, client: int, /) -> Indices:
        index = range(len(self))[client]
        return self._rows[self._starts[index] : self._starts[index + 1]]

    def size(self, client: int) -> int:
        return int(self._starts[client + 1] - self._starts[client])


@dataclass(frozen=True)
class DrawnParts:
    """Rows drawn deterministically on access, so that unused clients cost nothing."""

    by_label: list[Indices]
    num_clients: int
    alpha: float
    least: int
    most: int
    seed: int

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: int, /) -> Indices:
        rng = numpy_rng(self.seed, "drawn rows", client)
        counts = rng.multinomial(self.size(client), rng.dirichlet(np.full(len(self.by_label), self.alpha)))
        chosen = [rows[rng.integers(len(rows), size=count)] for rows, count in zip(self.by_label, counts, strict=True) if count]
        return np.sort(np.concatenate(chosen))

    def size(self, client: int) -> int:
        return self.least + derive(self.seed, "drawn size", client) % (self.most - self.least + 1)


def as_parts(split: Any) -> Parts:
    """Accept what a partitioner returned: ``Parts``, or a list of arrays from a user's own partitioner."""
    if isinstance(split, Parts) and not isinstance(split, np.ndarray):
        return split
    sizes = [len(part) for part in split]
    return StoredParts(np.concatenate([np.asarray(part) for part in split]), np.concatenate([[0], np.cumsum(sizes)]))


MAX_DRAWS = 1000
Alpha = Annotated[float, Range(0, 1e9, above=True)]
Rows = Annotated[int, at_least(1)]


class Partitioner(Protocol):
    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> Sequence[Indices] | Parts:
        """Return the rows of each client. No client is empty; except for ``DrawnPartitioner``, every row is in exactly one part."""


@dataclass(frozen=True, kw_only=True)
class DirichletPartitioner:
    """Splits each class by proportions drawn from Dirichlet(alpha) over the clients.

    The draw is repeated until every client has ``min_partition_size`` rows. With a smaller alpha, clients see fewer classes.
    """

    alpha: Alpha
    min_partition_size: Rows = 1

    def __post_init__(self) -> None:
        check_ranges(self, "dirichlet ")

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> StoredParts:
        _check(len(labels), num_clients, self.min_partition_size)
        for draw in range(MAX_DRAWS):
            parts = self._draw(labels, num_clients, numpy_rng(seed, "partition", draw))
            if np.bincount(parts, minlength=num_clients).min() >= self.min_partition_size:
                return StoredParts.of(parts, num_clients)
        raise ValueError(
            f"no Dirichlet({self.alpha}) split of {len(labels)} examples gave each of {num_clients} clients "
            f"at least {self.min_partition_size} in any of {MAX_DRAWS} draws: use fewer clients or a larger alpha"
        )

    def _draw(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> Indices:
        """Draw the client of each row."""
        client_of = np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            cuts = np.floor(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
            client_of[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
        return client_of


@dataclass(frozen=True, kw_only=True)
class IidPartitioner:
    """Splits shuffled rows into parts whose sizes differ by at most one."""

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> StoredParts:
        _check(len(labels), num_clients, 1)
        rows = numpy_rng(seed, "partition").permutation(len(labels))
        client_of = np.empty(len(labels), np.int64)
        client_of[rows] = _even(len(labels), num_clients)
        return StoredParts.of(client_of, num_clients)


@dataclass(frozen=True, kw_only=True)
class ShardPartitioner:
    """Cuts rows sorted by label into equal shards and gives each client ``num_shards_per_partition`` random shards."""

    num_shards_per_partition: Rows = 2

    def __post_init__(self) -> None:
        check_ranges(self, "partition.")

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> StoredParts:
        num_shards = num_clients * self.num_shards_per_partition
        _check(len(labels), num_shards, 1)
        rng = numpy_rng(seed, "partition")
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(np.asarray(labels)[shuffled], kind="stable")]
        client_of_shard = np.empty(num_shards, np.int64)
        client_of_shard[rng.permutation(num_shards)] = np.repeat(np.arange(num_clients), self.num_shards_per_partition)
        client_of = np.empty(len(labels), np.int64)
        client_of[by_label] = client_of_shard[_even(len(labels), num_shards)]
        return StoredParts.of(client_of, num_clients)


@dataclass(frozen=True, kw_only=True)
class HeldClassesPartitioner:
    """Gives the last ``num_held`` classes to the first ``num_holders`` clients, and deals the rest to the others.

    The holders divide ``held_share`` of these classes' examples evenly: with 1 nobody else has any. The others divide all remaining
    examples as with ``ShardPartitioner``. Together with ``runtimes.rule = "order"`` the holders are the slow clients.
    """

    num_held: Rows = 2
    num_holders: Rows = 2
    held_share: Annotated[float, share(above=True)] = 1.0
    num_shards_per_partition: Rows = 2

    def __post_init__(self) -> None:
        check_ranges(self, "partition.")

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> StoredParts:
        classes = np.unique(labels)
        if not self.num_held < len(classes) or not self.num_holders < num_clients:
            raise ValueError(
                f"partition.num_held is {self.num_held} of {len(classes)} classes and partition.num_holders is "
                f"{self.num_holders} of {num_clients} clients: other clients need at least one of each"
            )
        rng = numpy_rng(seed, "held classes")
        held = np.concatenate(
            [self._held(rng.permutation(np.flatnonzero(labels == each))) for each in classes[-self.num_held :]]
        )
        _check(len(held), self.num_holders, 1)
        others = np.setdiff1d(np.arange(len(labels)), held)
        shards = ShardPartitioner(num_shards_per_partition=self.num_shards_per_partition)
        rest = shards.split(np.asarray(labels)[others], num_clients - self.num_holders, seed)
        client_of = np.empty(len(labels), np.int64)
        client_of[held] = np.arange(len(held)) % self.num_holders
        for client in range(len(rest)):
            client_of[others[rest[client]]] = self.num_holders + client
        return StoredParts.of(client_of, num_clients)

    def _held(self, rows: Indices) -> Indices:
        return rows[: max(1, round(self.held_share * len(rows)))]


@dataclass(frozen=True, kw_only=True)
class DrawnPartitioner:
    """Gives each of any number of clients its own random examples, drawn with replacement, so that clients share examples.

    A client has ``min_examples`` to ``max_examples`` rows, with class proportions from its own Dirichlet(alpha) draw. Rows are
    drawn on access from the seed and the client number, so a million clients need no memory.
    """

    alpha: Alpha = 0.1
    min_examples: Rows = 20
    max_examples: Rows = 100

    def __post_init__(self) -> None:
        check_ranges(self, "partition.")
        if not self.min_examples <= self.max_examples:
            raise ValueError(
                f"need partition.min_examples <= partition.max_examples, got {self.min_examples} and {self.max_examples}"
            )

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> DrawnParts:
        _check(len(labels), 1, 1)
        by_label = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        return DrawnParts(by_label, num_clients, self.alpha, self.min_examples, self.max_examples, seed)


PARTITIONERS: dict[str, type[Any]] = {
    "dirichlet": DirichletPartitioner,
    "iid": IidPartitioner,
    "shards": ShardPartitioner,
    "held": HeldClassesPartitioner,
    "drawn": DrawnPartitioner,
}


def _even(num: int, num_parts: int) -> Indices:
    """Return the part of each index, with parts cut as by ``numpy.array_split``: sizes differ by at most one, larger ones first."""
    size, num_larger = divmod(num, num_parts)
    sizes = np.full(num_parts, size)
    sizes[:num_larger] += 1
    return np.repeat(np.arange(num_parts), sizes)


def _check(num_examples: int, num_parts: int, least: int) -> None:
    if num_parts < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_parts}")
    if num_parts * least > num_examples:
        raise ValueError(f"{num_examples} examples cannot fill {num_parts} parts of at least {least}: use fewer clients")

"""How labelled examples are split over clients. The names are those of flwr-datasets."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedecho.core.rng import numpy_rng

Indices = NDArray[np.int64]
MAX_DRAWS = 1000


class Partitioner(Protocol):
    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> list[Indices]:
        """The rows of each client: every row in exactly one client, no client empty."""
        ...


@dataclass(frozen=True, kw_only=True)
class DirichletPartitioner:
    """Per class, proportions ~ Dirichlet(alpha) over the clients; the shuffled rows of the class are cut accordingly.

    Drawn anew until every client has ``min_partition_size`` rows. The smaller alpha, the fewer classes a client sees.
    """

    alpha: float
    min_partition_size: int = 1

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"dirichlet alpha must be above 0, got {self.alpha}")
        if self.min_partition_size < 1:
            raise ValueError(f"min_partition_size must be at least 1, got {self.min_partition_size}")

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> list[Indices]:
        _check(len(labels), num_clients, self.min_partition_size)
        for draw in range(MAX_DRAWS):
            parts = self._draw(labels, num_clients, numpy_rng(seed, "partition", draw))
            if min(map(len, parts)) >= self.min_partition_size:
                return parts
        raise ValueError(
            f"no Dirichlet({self.alpha}) split of {len(labels)} examples gave each of {num_clients} clients "
            f"{self.min_partition_size} in {MAX_DRAWS} draws: use fewer clients or a larger alpha"
        )

    def _draw(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        pieces: list[list[Indices]] = [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            cuts = np.floor(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
            for client, piece in enumerate(np.split(rows, cuts)):
                pieces[client].append(piece)
        return [np.sort(np.concatenate(mine)) for mine in pieces]


@dataclass(frozen=True, kw_only=True)
class IidPartitioner:
    """Shuffled rows in parts of equal size, give or take one."""

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> list[Indices]:
        _check(len(labels), num_clients, 1)
        rows = numpy_rng(seed, "partition").permutation(len(labels))
        return [np.sort(part) for part in np.array_split(rows, num_clients)]


@dataclass(frozen=True, kw_only=True)
class ShardPartitioner:
    """Rows sorted by label, cut into equal shards; every client gets ``num_shards_per_partition`` of them at random."""

    num_shards_per_partition: int = 2

    def __post_init__(self) -> None:
        if self.num_shards_per_partition < 1:
            raise ValueError(f"num_shards_per_partition must be at least 1, got {self.num_shards_per_partition}")

    def split(self, labels: NDArray[Any], num_clients: int, seed: int) -> list[Indices]:
        num_shards = num_clients * self.num_shards_per_partition
        _check(len(labels), num_shards, 1)
        rng = numpy_rng(seed, "partition")
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(np.asarray(labels)[shuffled], kind="stable")]
        shards = np.array_split(by_label, num_shards)
        order = rng.permutation(num_shards).reshape(num_clients, self.num_shards_per_partition)
        return [np.sort(np.concatenate([shards[shard] for shard in mine])) for mine in order]


PARTITIONERS: dict[str, type[Any]] = {
    "dirichlet": DirichletPartitioner,
    "iid": IidPartitioner,
    "shards": ShardPartitioner,
}


def _check(num_examples: int, num_parts: int, least: int) -> None:
    if num_parts < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_parts}")
    if num_parts * least > num_examples:
        raise ValueError(f"{num_examples} examples cannot fill {num_parts} parts of at least {least}")

"""Which rows belong to which client, without an object for each client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from fedecho.core.rng import derive, numpy_rng

Indices = NDArray[np.int64]


class Parts(Protocol):
    """The rows of each client, in ascending order."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> Indices: ...

    def size(self, client: int) -> int:
        """How many there are, at the price of a look-up."""
        ...


class HeldParts(Sequence[Indices]):
    """All rows end to end: client i's are those from ``starts[i]`` to ``starts[i + 1]``."""

    def __init__(self, rows: Indices, starts: Indices) -> None:
        self._rows, self._starts = rows, starts

    @classmethod
    def of(cls, clients: Indices, num_clients: int) -> "HeldParts":
        """From the client of each row."""
        counts = np.bincount(clients, minlength=num_clients)
        rows = np.argsort(clients, kind="stable").astype(np.int64, copy=False)
        return cls(rows, np.concatenate([[0], counts.cumsum()]))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, client: int, /) -> Indices: ...

    @overload
    def __getitem__(self, client: slice, /) -> list[Indices]: ...

    def __getitem__(self, client: int | slice, /) -> Indices | list[Indices]:
        if isinstance(client, slice):
            return [self[each] for each in range(len(self))[client]]
        place = range(len(self))[client]
        return self._rows[self._starts[place] : self._starts[place + 1]]

    def size(self, client: int) -> int:
        return int(self._starts[client + 1] - self._starts[client])


@dataclass(frozen=True)
class DrawnParts:
    """Rows that are drawn when they are asked for, the same every time: a client who is never asked costs nothing at all."""

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
    """What a partitioner gave: one of the above, or of a user's own a list of arrays."""
    if hasattr(split, "size") and not isinstance(split, np.ndarray):
        found: Parts = split
        return found
    sizes = [len(part) for part in split]
    return HeldParts(np.concatenate([np.asarray(part) for part in split]), np.concatenate([[0], np.cumsum(sizes)]))

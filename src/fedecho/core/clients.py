"""Sets of client numbers: idle clients with constant-time random selection, and a compact grow-only set."""

from array import array
from collections.abc import Iterable, Iterator, Set

import numpy as np


class Idle:
    """An indexable set of small integers with O(1) random selection and removal.

    It uses two arrays of four bytes per client, so a million clients take 8 MB. The order of its entries depends on the history
    and decides which clients are selected, so checkpoints must store it.
    """

    def __init__(self, clients: Iterable[int], num_clients: int) -> None:
        self._order = array("i", clients)
        self._index = array("i", [-1]) * num_clients
        if self._order:
            order = np.frombuffer(self._order, np.int32)
            np.frombuffer(self._index, np.int32)[order] = np.arange(len(order), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, client: int) -> bool:
        return self._index[client] >= 0

    def __getitem__(self, index: int) -> int:
        return self._order[index]

    def add(self, client: int) -> None:
        if self._index[client] < 0:
            self._index[client] = len(self._order)
            self._order.append(client)

    def remove(self, client: int) -> None:
        """Remove a client; the last entry moves into its position. No-op if absent."""
        index = self._index[client]
        if index < 0:
            return
        last = self._order.pop()
        if last != client:
            self._order[index] = last
            self._index[last] = index
        self._index[client] = -1

    def ordered(self) -> list[int]:
        """Return the clients in their internal order, for a checkpoint."""
        return self._order.tolist()


class NumberSet(Set[int]):
    """A grow-only set of non-negative integers that stores one byte per possible number."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._present = bytearray()
        self._size = 0
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"a number in this set must be at least 0, got {number}")
        if number >= len(self._present):
            self._present.extend(bytes(max(number + 1 - len(self._present), len(self._present) // 8 + 64)))
        self._size += 1 - self._present[number]
        self._present[number] = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < len(self._present) and self._present[number] == 1

    def __iter__(self) -> Iterator[int]:
        return (number for number, present in enumerate(self._present) if present)

    def __len__(self) -> int:
        return self._size

    def __hash__(self) -> int:
        return self._hash()

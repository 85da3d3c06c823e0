"""A set of numbers below some bound, one byte each: a Python set takes sixty."""

from collections.abc import Iterable, Iterator, Set


class NumberSet(Set[int]):
    """Reads like any set. ``add`` grows it; a number never added is not in it, however large."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._there = bytearray()
        self._size = 0
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"only numbers from 0 on can be added, got {number}")
        if number >= len(self._there):
            self._there.extend(bytes(max(number + 1 - len(self._there), len(self._there) // 8 + 64)))
        self._size += 1 - self._there[number]
        self._there[number] = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < len(self._there) and self._there[number] == 1

    def __iter__(self) -> Iterator[int]:
        return (number for number, there in enumerate(self._there) if there)

    def __len__(self) -> int:
        return self._size

    def __hash__(self) -> int:
        return self._hash()

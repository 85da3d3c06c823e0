"""The runtime class of every client: a byte each, and where a class is drawn client by client, not before somebody asks."""

from collections.abc import Callable, Sequence
from typing import overload

UNKNOWN = 255


class Classes(Sequence[str]):
    """Names by client. ``draw``, where there is one, gives a client's code at the first question."""

    def __init__(self, names: tuple[str, ...], codes: bytearray, draw: Callable[[int], int] | None = None) -> None:
        self.names = names
        self._codes = codes
        self._draw = draw

    @classmethod
    def drawn(cls, names: tuple[str, ...], num_clients: int, draw: Callable[[int], int]) -> "Classes":
        return cls(names, bytearray([UNKNOWN]) * num_clients, draw)

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, client: int) -> str: ...

    @overload
    def __getitem__(self, client: slice) -> list[str]: ...

    def __getitem__(self, client: int | slice) -> str | list[str]:
        if isinstance(client, slice):
            return [self[each] for each in range(len(self))[client]]
        code = self._codes[client]
        if code == UNKNOWN and self._draw is not None:
            code = self._codes[client] = self._draw(client)
        return self.names[code]

    def counts(self) -> dict[str, int] | None:
        """How many clients are of each class; None where that would mean to ask them all."""
        if self._draw is not None:
            return None
        return {name: self._codes.count(code) for code, name in enumerate(self.names)}

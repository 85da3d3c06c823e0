"""The event queue of the virtual clock: a heap of (time, running number, event)."""

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["finish", "drop", "leave", "join"]
KINDS: tuple[Kind, ...] = ("finish", "drop", "leave", "join")


class Event(NamedTuple):
    """``number`` is that of the dispatch, or of the spell for a client that comes or goes."""

    kind: Kind
    client: int
    number: int


class EventQueue:
    """Events in the order of time; at one time, in the order they were put. Events themselves are never compared.

    Events that are put all at once wait in sorted columns of numbers, some thirty bytes each, and become objects one by one when
    their time comes: so the first leave of each of a million clients, or a queue out of a checkpoint, costs next to nothing.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._waiting = _Columns()
        self._next = 0
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._heap) + len(self._waiting)

    def put(self, time: float, event: Event) -> None:
        if not time >= self.now:
            raise ValueError(f"an event at {time} would lie before the clock at {self.now}")
        heappush(self._heap, (time, self._next, event))
        self._next += 1

    def put_all(self, times: Sequence[float], kind: Kind) -> None:
        """Number 0 of ``kind`` for each client in turn, as if put one after the other into a queue that is still empty."""
        if len(self):
            raise ValueError("many events at once can be put only into an empty queue")
        if min(times, default=self.now) < self.now:
            raise ValueError(f"an event at {min(times)} would lie before the clock at {self.now}")
        num = len(times)
        zeros = np.zeros(num, np.int64)
        numbers = self._next + np.arange(num)
        self._waiting = _Columns.sorted(np.asarray(times), numbers, zeros + KINDS.index(kind), np.arange(num), zeros)
        self._next += num

    def pop(self) -> Event:
        """The next event; the clock moves to it."""
        if self._waiting.left and (not self._heap or self._waiting.head < self._heap[0][:2]):
            self.now, _, event = self._waiting.pop()
            if not self._waiting.left:
                self._waiting = _Columns()  # and their room is free
        else:
            self.now, _, event = heappop(self._heap)
        return event

    def entries(self) -> list[tuple[float, int, Event]]:
        """In the order of the clock."""
        return sorted([*self._waiting.entries(), *self._heap], key=lambda entry: entry[:2])

    def to_tree(self) -> dict[str, Any]:
        """Columns, which a checkpoint holds as numbers."""
        entries = self.entries()
        return {
            "now": self.now,
            "next": self._next,
            "times": [time for time, _, _ in entries],
            "numbers": [number for _, number, _ in entries],
            "kinds": [KINDS.index(event.kind) for _, _, event in entries],
            "clients": [event.client for _, _, event in entries],
            "of": [event.number for _, _, event in entries],
        }

    def from_tree(self, tree: dict[str, Any]) -> "EventQueue":
        if "entries" in tree:  # of a checkpoint from before there were columns
            rows = tree["entries"]
            columns = [[row[place] for row in rows] for place in range(5)]
            columns[2] = [KINDS.index(kind) for kind in columns[2]]
        else:
            columns = [tree[name] for name in ("times", "numbers", "kinds", "clients", "of")]
        self._heap = []
        self._waiting = _Columns.sorted(*(np.array(column) for column in columns))
        self._next = tree["next"]
        self.now = tree["now"]
        return self


class _Columns:
    """Events as columns of numbers, in the order of the clock; taken from the front."""

    def __init__(self) -> None:
        self.times, self.numbers, self.kinds = array("d"), array("q"), array("b")
        self.clients, self.of = array("q"), array("q")
        self.at = 0
        self.left = False

    @classmethod
    def sorted(cls, *columns: Any) -> "_Columns":
        """Times, running numbers, kinds, clients and what the events are number of."""
        made = cls()
        order = np.lexsort((columns[1], columns[0]))
        for own, column in zip(made._columns(), columns, strict=True):
            own.frombytes(column[order].astype(own.typecode).tobytes())
        made.left = bool(made.times)
        return made

    def _columns(self) -> "tuple[array[Any], ...]":
        return self.times, self.numbers, self.kinds, self.clients, self.of

    def __len__(self) -> int:
        return len(self.times) - self.at

    @property
    def head(self) -> tuple[float, int]:
        return self.times[self.at], self.numbers[self.at]

    def entry(self, at: int) -> tuple[float, int, Event]:
        return self.times[at], self.numbers[at], Event(KINDS[self.kinds[at]], self.clients[at], self.of[at])

    def pop(self) -> tuple[float, int, Event]:
        entry = self.entry(self.at)
        self.at += 1
        self.left = self.at < len(self.times)
        return entry

    def entries(self) -> list[tuple[float, int, Event]]:
        return [self.entry(at) for at in range(self.at, len(self.times))]

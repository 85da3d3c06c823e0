"""The event queue of the virtual clock: a heap of (time, running number, event)."""

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["finish", "drop", "leave", "join"]
KINDS: tuple[Kind, ...] = ("finish", "drop", "leave", "join")


class Event(NamedTuple):
    """An event of one client. ``number`` is the dispatch number, or the spell number for ``leave`` and ``join``."""

    kind: Kind
    client: int
    number: int


class EventQueue:
    """Events ordered by time, and by insertion order at equal times. Events themselves are never compared.

    Events added in bulk are kept as sorted columns of numbers, about thirty bytes each, and become objects only when they are
    popped. The first departure of each of a million clients, or a queue from a checkpoint, therefore costs little memory.
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
            raise ValueError(f"an event at {time} lies before the current time {self.now}")
        heappush(self._heap, (time, self._next, event))
        self._next += 1

    def put_all(self, times: Sequence[float], kind: Kind) -> None:
        """Add event number 0 of ``kind`` for every client, as if put one by one. The queue must be empty."""
        if len(self):
            raise ValueError(f"put_all needs an empty queue, got one with {len(self)} events")
        if min(times, default=self.now) < self.now:
            raise ValueError(f"an event at {min(times)} lies before the current time {self.now}")
        num = len(times)
        zeros = np.zeros(num, np.int64)
        numbers = self._next + np.arange(num)
        self._waiting = _Columns.sorted(np.asarray(times), numbers, zeros + KINDS.index(kind), np.arange(num), zeros)
        self._next += num

    def pop(self) -> Event:
        """Remove the next event and advance the clock to it."""
        if self._waiting.any_left and (not self._heap or self._waiting.head < self._heap[0][:2]):
            self.now, _, event = self._waiting.pop()
            if not self._waiting.any_left:
                self._waiting = _Columns()  # frees the memory
        else:
            self.now, _, event = heappop(self._heap)
        return event

    def entries(self) -> list[tuple[float, int, Event]]:
        """Return all events as (time, running number, event) in the order they will be popped."""
        return sorted([*self._waiting.entries(), *self._heap], key=lambda entry: entry[:2])

    def to_tree(self) -> dict[str, Any]:
        """Return the queue as columns of numbers for a checkpoint."""
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
        """Restore what ``to_tree`` returned."""
        self._heap = []
        columns = (tree[name] for name in ("times", "numbers", "kinds", "clients", "of"))
        self._waiting = _Columns.sorted(*(np.array(column) for column in columns))
        self._next = tree["next"]
        self.now = tree["now"]
        return self


class _Columns:
    """Events as sorted columns of numbers, popped from the front."""

    def __init__(self) -> None:
        self.times, self.numbers, self.kinds = array("d"), array("q"), array("b")
        self.clients, self.event_numbers = array("q"), array("q")
        self.next = 0
        self.any_left = False
        """Kept as an attribute because every pop reads it."""

    @classmethod
    def sorted(cls, *columns: Any) -> "_Columns":
        """Sort columns of times, running numbers, kinds, clients and event numbers by time and running number."""
        result = cls()
        order = np.lexsort((columns[1], columns[0]))
        for own, column in zip(result._columns(), columns, strict=True):
            own.frombytes(column[order].astype(own.typecode).tobytes())
        result.any_left = bool(result.times)
        return result

    def _columns(self) -> "tuple[array[Any], ...]":
        return self.times, self.numbers, self.kinds, self.clients, self.event_numbers

    def __len__(self) -> int:
        return len(self.times) - self.next

    @property
    def head(self) -> tuple[float, int]:
        return self.times[self.next], self.numbers[self.next]

    def entry(self, row: int) -> tuple[float, int, Event]:
        return self.times[row], self.numbers[row], Event(KINDS[self.kinds[row]], self.clients[row], self.event_numbers[row])

    def pop(self) -> tuple[float, int, Event]:
        entry = self.entry(self.next)
        self.next += 1
        self.any_left = self.next < len(self.times)
        return entry

    def entries(self) -> list[tuple[float, int, Event]]:
        return [self.entry(row) for row in range(self.next, len(self.times))]

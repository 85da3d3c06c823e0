"""The event queue of the virtual clock: a heap of (time, running number, event)."""

from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal, NamedTuple

Kind = Literal["finish", "drop", "leave", "join"]


class Event(NamedTuple):
    """``number`` is that of the dispatch, or of the spell for a client that comes or goes."""

    kind: Kind
    client: int
    number: int


class EventQueue:
    """Events in the order of time; at one time, in the order they were put. Events themselves are never compared."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._numbers = count()
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, time: float, event: Event) -> None:
        if not time >= self.now:
            raise ValueError(f"an event at {time} would lie before the clock at {self.now}")
        heappush(self._heap, (time, next(self._numbers), event))

    def pop(self) -> Event:
        """The next event; the clock moves to it."""
        self.now, _, event = heappop(self._heap)
        return event

    def entries(self) -> list[tuple[float, int, Event]]:
        """In the order of the clock."""
        return sorted(self._heap, key=lambda entry: entry[:2])

    def to_tree(self) -> dict[str, Any]:
        entries = [[time, number, e.kind, e.client, e.number] for time, number, e in self.entries()]
        return {"now": self.now, "entries": entries, "next": self._next_number()}

    def from_tree(self, tree: dict[str, Any]) -> "EventQueue":
        # A sorted list is a heap.
        self._heap = [(time, number, Event(kind, client, what)) for time, number, kind, client, what in tree["entries"]]
        self._numbers = count(tree["next"])
        self.now = tree["now"]
        return self

    def _next_number(self) -> int:
        number = next(self._numbers)
        self._numbers = count(number)
        return number

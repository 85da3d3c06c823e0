"""Which client is behind which node. Node ids are random and change when a node is started anew; clients' numbers do not."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that were not there at the last look, and clients whose node is gone."""

    came: list[int]
    gone: list[int]


class Roster:
    """Clients are numbered 0 to N - 1, and each has at most one node."""

    def __init__(self, num_clients: int, say: Callable[[str], None] = lambda text: None) -> None:
        self.num_clients = num_clients
        self._say = say
        self._connected: set[int] = set()
        self._node_of: dict[int, int] = {}
        self._client_of: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._numbers_of: dict[int, set[int]] = {}
        """``_before`` by node."""
        self._fresh = 0
        """No number below it is fresh."""
        self._freed: list[int] = []
        """A heap of numbers that had a node; some may have one again."""
        self._claims: dict[int, int] = {}
        self._unnumbered: dict[int, None] = {}
        """Nodes for whom there was no number, in the order they came."""

    @property
    def clients(self) -> list[int]:
        """The clients that have a node now."""
        return sorted(self._node_of)

    @property
    def numbers(self) -> dict[int, int]:
        """The last node of each client, for a checkpoint."""
        return dict(self._before)

    def remember(self, numbers: Mapping[int, int]) -> None:
        """Nodes that were there before a resume get their numbers again."""
        self._before, self._numbers_of, self._fresh = {}, {}, 0
        for client, node in {**numbers, **self._node_of}.items():
            self._note(client, node)
        self._freed = sorted(self._before)

    def _note(self, client: int, node: int) -> None:
        """``node`` is the last that was ``client``."""
        former = self._before.get(client)
        if former is not None:
            self._numbers_of[former].discard(client)
        self._before[client] = node
        self._numbers_of.setdefault(node, set()).add(client)

    def node_of(self, client: int) -> int | None:
        return self._node_of.get(client)

    def look(self, nodes: Iterable[int]) -> Change:
        """Take note of who is connected."""
        now = set(nodes)
        came, left = sorted(now - self._connected), sorted(self._connected - now)
        self._connected = now
        gone = [client for node in left if (client := self.forget(node)) is not None]
        return Change(came, gone)

    def forget(self, node: int) -> int | None:
        """A node is gone (or must say anew who it is); the client it was, if any."""
        self._connected.discard(node)
        self._claims.pop(node, None)
        self._unnumbered.pop(node, None)
        client = self._client_of.pop(node, None)
        if client is not None:
            del self._node_of[client]
            heappush(self._freed, client)
        return client

    def enter(self, node: int, client: int) -> bool:
        """A node says which client it is. A number out of range is refused; one that is taken must become free first.

        So a node that was started anew waits until its former self is known to be gone, and nobody takes another's place.
        """
        if not 0 <= client < self.num_clients:
            self._say(f"node {node} says it is client {client}, but clients are 0 to {self.num_clients - 1}: it gets no work")
            return False
        if client in self._node_of:
            self._say(f"node {node} says it is client {client}, which node {self._node_of[client]} is already: it has to wait")
            self._claims[node] = client
            return False
        self._claims.pop(node, None)
        self._node_of[client], self._client_of[node] = node, client
        self._note(client, node)
        return True

    def heirs(self) -> list[int]:
        """Clients that have a node again, because one had waited: for this number, or for any."""
        free = [(node, client) for node, client in self._claims.items() if client not in self._node_of]
        found = [client for node, client in free if self.enter(node, client)]
        for node in list(self._unnumbered):
            number = self.number(node)
            if number is not None and self.enter(node, number):
                found.append(number)
        return found

    def number(self, node: int) -> int | None:
        """A number for a node that cannot be asked: its own of before, a new one, or that of a node that is gone.

        None: all are taken, maybe by the node's former self, which is listed for a while after it died. Such a node is an heir.
        """
        own = [client for client in self._numbers_of.get(node, ()) if client not in self._node_of]
        if own:
            found: int | None = min(own)
        else:
            found = self._first_fresh()
            found = self._first_freed() if found is None else found
        if found is None:
            if node not in self._unnumbered:
                self._say(f"node {node} is one more than num_clients = {self.num_clients}: it gets no work until one goes")
            self._unnumbered[node] = None
            return None
        self._unnumbered.pop(node, None)
        return found

    def _first_fresh(self) -> int | None:
        """The first number that nobody ever had. Who has one keeps it in ``_before``, so the search never goes back."""
        while self._fresh < self.num_clients and self._fresh in self._before:
            self._fresh += 1
        return self._fresh if self._fresh < self.num_clients else None

    def _first_freed(self) -> int | None:
        """The first number whose node is gone."""
        while self._freed and self._freed[0] in self._node_of:
            heappop(self._freed)
        return self._freed[0] if self._freed else None

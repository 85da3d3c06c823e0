"""Which client is behind which node. Node ids are random and change when a node is started anew; clients' numbers do not."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


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
        self._before = dict(numbers)

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
        self._node_of[client], self._client_of[node], self._before[client] = node, client, node
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
        free = [client for client in range(self.num_clients) if client not in self._node_of]
        own = [client for client in free if self._before.get(client) == node]
        fresh = [client for client in free if client not in self._before]
        if not free:
            if node not in self._unnumbered:
                self._say(f"node {node} is one more than num_clients = {self.num_clients}: it gets no work until one goes")
            self._unnumbered[node] = None
            return None
        self._unnumbered.pop(node, None)
        return (own or fresh or free)[0]

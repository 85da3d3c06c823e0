"""What the transport needs from Flower's grid: reply codes, connection loss, deadlines, and the roster of nodes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Annotated, TypeVar

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from fedecho.core.ranges import at_least, check_ranges
from fedecho.core.server import one_line
from fedecho.core.types import CLIENT_FAILED

NODE_GONE, ANSWER_LOST, DEADLINE, NOT_PUSHED = "node gone", "answer lost", "deadline", "not pushed"
"""Codes of losses that are not the client's fault. A client's own failure has the code ``CLIENT_FAILED``."""

EXPIRED, UNAVAILABLE, NODE_UNAVAILABLE = 3, 4, 5
MEANINGS = {0: "failed", 1: "its app cannot be loaded", 2: "its app raised", 3: "the answer expired (past its time to live)"}
MEANINGS |= {4: "the answer is unavailable", 5: "the node disconnected", 6: "refused by a mod", 7: "its app is not trusted"}
MEANINGS |= {8: "its app crashed"}
WITH_DETAILS = (0, 1, 2, 6, 8)
"""Error codes whose text is worth reporting."""


def content_of(reply: Message) -> RecordDict:
    """The records of a reply. Raises ValueError with the reason if there are none."""
    if not reply.has_content():
        raise ValueError(error_text(reply))
    if not isinstance(reply.content, RecordDict):
        raise ValueError(f"the content is a {type(reply.content).__name__}, not a RecordDict")
    return reply.content


def is_gone(reply: Message) -> bool:
    return bool(reply.has_error() and reply.error.code == NODE_UNAVAILABLE)


def is_from_node(reply: Message) -> bool:
    """Whether the node itself replied, even with an error. Other replies come from the SuperLink; the node may still be busy."""
    return not (reply.has_error() and reply.error.code in (EXPIRED, UNAVAILABLE, NODE_UNAVAILABLE))


def loss_code(reply: Message) -> str:
    return CLIENT_FAILED if is_from_node(reply) else NODE_GONE if is_gone(reply) else ANSWER_LOST


def error_text(reply: Message) -> str:
    error = reply.error
    details = " ".join(one_line(error.reason or "", 200).split())
    return (
        f"{MEANINGS.get(error.code, f'error {error.code}')}{': ' + details if details and error.code in WITH_DETAILS else ''}"
    )


RESUME_HINT = "submit the app again with the same run folder to resume"

Answer = TypeVar("Answer")


class SuperLinkGoneError(ConnectionError):
    """The SuperLink is unreachable or has ended the run. What is saved is consistent."""


class SuperLink:
    """A grid that raises ``SuperLinkGoneError`` after ``gone_s`` seconds without an answer."""

    def __init__(self, grid: Grid, gone_s: float) -> None:
        self._grid = grid
        self._gone_s = gone_s
        retries = getattr(grid, "_retry_invoker", None)  # private to flwr's HttpGrid, which has no setting for it
        if retries is not None:
            retries.max_time = gone_s

    def get_node_ids(self) -> list[int]:
        return self._call(lambda: list(self._grid.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return self._call(lambda: list(self._grid.push_messages(messages)))

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        return self._call(lambda: list(self._grid.pull_messages(numbers)))

    def _call(self, request: Callable[[], Answer]) -> Answer:
        try:
            return request()
        except httpx.TransportError as error:
            raise SuperLinkGoneError(
                f"the SuperLink has not answered for {self._gone_s:g} s ({error}): {RESUME_HINT}"
            ) from error
        except RunNotRunningException as error:
            raise SuperLinkGoneError(f"the SuperLink has ended this run: {RESUME_HINT}") from error


Seconds = Annotated[float, at_least(0, most=1e8)]
"""Up to three years."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How long to wait for nodes and answers, in seconds.

    A client's deadline is ``slack`` times its slowest answer so far, but at least ``least_s`` and at most ``timeout_s``. With
    ``timeout_s=None`` there is no deadline, and jobs are given up only when their node disconnects.
    """

    min_nodes: Annotated[int, at_least(1, most=10**6)] = 1
    """The run starts once this many clients are connected."""
    timeout_s: Annotated[float, at_least(0, most=1e300)] | None = 3600.0
    least_s: Seconds = 300.0
    slack: Annotated[float, at_least(1, most=1e6)] = 10.0
    poll_s: Seconds = 0.5
    nodes_s: Seconds = 5.0
    """Interval at which the list of connected nodes is refreshed."""
    gone_s: Seconds = 30.0
    """Timeout for the SuperLink itself. The run then stops; submit it again to resume."""

    def __post_init__(self) -> None:
        check_ranges(self)


class Deadlines:
    """Deadlines from each client's slowest answer; before its first answer, the timeout."""

    TTL_FACTOR = 3.0
    """The SuperLink silently drops a message past its TTL while the node may still be busy, so the TTL exceeds all deadlines."""
    LONGEST_TTL_S = 10 * 365 * 86400.0
    """Flower requires a finite expiry date."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.slowest_s: dict[int, float] = {}

    def record(self, client: int, runtime_s: float) -> None:
        self.slowest_s[client] = max(self.slowest_s.get(client, 0.0), runtime_s)

    def deadline_s(self, client: int) -> float:
        if self.waiting.timeout_s is None:
            return inf
        if client not in self.slowest_s:
            return self.waiting.timeout_s
        return min(self.waiting.timeout_s, max(self.waiting.least_s, self.waiting.slack * self.slowest_s[client]))

    @property
    def ttl_s(self) -> float:
        """Time to live of a message sent now: a multiple of the longest possible deadline."""
        if self.waiting.timeout_s is None:
            return self.LONGEST_TTL_S
        slowest = max(self.slowest_s.values(), default=0.0)
        return min(self.LONGEST_TTL_S, self.TTL_FACTOR * max(self.waiting.timeout_s, self.waiting.slack * slowest, 60.0))


@dataclass(frozen=True, slots=True)
class RosterChange:
    """Nodes that connected since the last refresh, and clients whose node disconnected."""

    new_nodes: list[int]
    lost_clients: list[int]


class Roster:
    """Which node is which client. Clients are numbered 0 to N - 1, and each has at most one node."""

    def __init__(self, num_clients: int, say: Callable[[str], None] = lambda text: None) -> None:
        self.num_clients = num_clients
        self._say = say
        self._connected: set[int] = set()
        self._node_of: dict[int, int] = {}
        self._client_of: dict[int, int] = {}
        self._last_node_of: dict[int, int] = {}
        """By client, also of clients that have no node now."""
        self._former_clients_of: dict[int, set[int]] = {}
        """The inverse of ``_last_node_of``."""
        self._next_unused = 0
        """All numbers below it have been used."""
        self._freed: list[int] = []
        """A heap of numbers whose node disconnected; some may be taken again."""
        self._claims: dict[int, int] = {}
        """Nodes that wait for the number of another node."""
        self._unnumbered: dict[int, None] = {}
        """Nodes that wait for any number, in order of arrival."""

    @property
    def clients(self) -> list[int]:
        """The clients that are connected."""
        return sorted(self._node_of)

    @property
    def numbers(self) -> dict[int, int]:
        """The last node of each client, to be saved in checkpoints."""
        return dict(self._last_node_of)

    def remember(self, numbers: Mapping[int, int]) -> None:
        """Restore the last node of each client, so that nodes get the same numbers after a resume."""
        self._last_node_of, self._former_clients_of, self._next_unused = {}, {}, 0
        for client, node in {**numbers, **self._node_of}.items():
            self._remember_node(client, node)
        self._freed = sorted(self._last_node_of)

    def _remember_node(self, client: int, node: int) -> None:
        """Make ``node`` the last node of ``client``."""
        former = self._last_node_of.get(client)
        if former is not None:
            self._former_clients_of[former].discard(client)
        self._last_node_of[client] = node
        self._former_clients_of.setdefault(node, set()).add(client)

    def node_of(self, client: int) -> int | None:
        return self._node_of.get(client)

    def refresh(self, nodes: Iterable[int]) -> RosterChange:
        """Update the set of connected nodes."""
        connected = set(nodes)
        new, gone = sorted(connected - self._connected), sorted(self._connected - connected)
        self._connected = connected
        return RosterChange(new, [client for node in gone if (client := self.forget(node)) is not None])

    def forget(self, node: int) -> int | None:
        """Remove a node that is gone or must introduce itself again. Returns the client that it was, if any."""
        self._connected.discard(node)
        self._claims.pop(node, None)
        self._unnumbered.pop(node, None)
        client = self._client_of.pop(node, None)
        if client is not None:
            del self._node_of[client]
            heappush(self._freed, client)
        return client

    def enter(self, node: int, client: int) -> bool:
        """Register a node as a client. Returns False if the number is out of range or taken.

        A node that claims a taken number waits until it is free. A restarted node therefore waits until its former process is
        known to be gone, and no node can replace another.
        """
        if not 0 <= client < self.num_clients:
            self._say(f"node {node} claims to be client {client}, but clients are 0 to {self.num_clients - 1}: it gets no work")
            return False
        if client in self._node_of:
            self._say(
                f"node {node} claims to be client {client}, which is node {self._node_of[client]}: it waits for that node to leave"
            )
            self._claims[node] = client
            return False
        self._claims.pop(node, None)
        self._node_of[client], self._client_of[node] = node, client
        self._remember_node(client, node)
        return True

    def admit_waiting(self) -> list[int]:
        """Give free numbers to nodes that wait for them. Returns the clients that are connected again."""
        free = [(node, client) for node, client in self._claims.items() if client not in self._node_of]
        admitted = [client for node, client in free if self.enter(node, client)]
        for node in list(self._unnumbered):
            number = self.number(node)
            if number is not None and self.enter(node, number):
                admitted.append(number)
        return admitted

    def number(self, node: int) -> int | None:
        """A number for a node that cannot be queried: its former one, an unused one, or that of a node that is gone.

        None if all are taken, perhaps by the node's former process, which stays listed for a while. The node then waits.
        """
        own = [client for client in self._former_clients_of.get(node, ()) if client not in self._node_of]
        if own:
            number: int | None = min(own)
        else:
            number = self._first_unused()
            number = self._first_freed() if number is None else number
        if number is None:
            if node not in self._unnumbered:
                self._say(f"node {node} gets no work until another leaves: num_clients is {self.num_clients}")
            self._unnumbered[node] = None
            return None
        self._unnumbered.pop(node, None)
        return number

    def _first_unused(self) -> int | None:
        """The lowest number that was never used."""
        while self._next_unused < self.num_clients and self._next_unused in self._last_node_of:
            self._next_unused += 1
        return self._next_unused if self._next_unused < self.num_clients else None

    def _first_freed(self) -> int | None:
        """The lowest number whose node is gone."""
        while self._freed and self._freed[0] in self._node_of:
            heappop(self._freed)
        return self._freed[0] if self._freed else None

"""Flower's grid as the transport needs it: reply codes, a SuperLink that may be gone, deadlines, and the node roster."""

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
"""Codes of losses that are nobody's fault; a client's own failure is ``CLIENT_FAILED``."""

EXPIRED, UNAVAILABLE, NODE_UNAVAILABLE = 3, 4, 5
MEANINGS = {0: "failed", 1: "its app cannot be loaded", 2: "its app raised", 3: "the answer is lost (past its time to live)"}
MEANINGS |= {4: "the answer is unavailable", 5: "the node went away", 6: "refused by a mod", 7: "its app is not trusted"}
MEANINGS |= {8: "its app crashed"}
WITH_WORDS = (0, 1, 2, 6, 8)


def content_of(reply: Message) -> RecordDict:
    """A ValueError says why there is none."""
    if not reply.has_content():
        raise ValueError(error_text(reply))
    if not isinstance(reply.content, RecordDict):
        raise ValueError(f"the content is a {type(reply.content).__name__}, not records")
    return reply.content


def is_gone(reply: Message) -> bool:
    return bool(reply.has_error() and reply.error.code == NODE_UNAVAILABLE)


def is_from_node(reply: Message) -> bool:
    """Did the node itself speak, well or badly? The SuperLink makes the other replies, while the node may still be at work."""
    return not (reply.has_error() and reply.error.code in (EXPIRED, UNAVAILABLE, NODE_UNAVAILABLE))


def loss_code(reply: Message) -> str:
    return CLIENT_FAILED if is_from_node(reply) else NODE_GONE if is_gone(reply) else ANSWER_LOST


def error_text(reply: Message) -> str:
    error = reply.error
    said = " ".join(one_line(error.reason or "", 200).split())
    return f"{MEANINGS.get(error.code, f'error {error.code}')}{': ' + said if said and error.code in WITH_WORDS else ''}"


GO_ON = "submit the app again with the same run folder to go on"

Answer = TypeVar("Answer")


class SuperLinkGoneError(ConnectionError):
    """Nothing can be asked of nodes any more. What is saved is whole."""


class SuperLink:
    """What a transport needs of a grid. After ``gone_s`` seconds without an answer the SuperLink is gone."""

    def __init__(self, grid: Grid, gone_s: float) -> None:
        self._grid = grid
        self._gone_s = gone_s
        retries = getattr(grid, "_retry_invoker", None)  # of flwr's HttpGrid, which has no setting for it
        if retries is not None:
            retries.max_time = gone_s

    def get_node_ids(self) -> list[int]:
        return self._asked(lambda: list(self._grid.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return self._asked(lambda: list(self._grid.push_messages(messages)))

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        return self._asked(lambda: list(self._grid.pull_messages(numbers)))

    def _asked(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except httpx.TransportError as error:
            raise SuperLinkGoneError(f"no answer from the SuperLink for {self._gone_s:g} s ({error}): {GO_ON}") from error
        except RunNotRunningException as error:
            raise SuperLinkGoneError(f"the SuperLink has ended this run: {GO_ON}") from error


Seconds = Annotated[float, at_least(0, most=1e8)]
"""Up to three years."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """In seconds. A client's deadline is ``slack`` times its own slowest answer, at least ``least_s``, at most ``timeout_s``.

    With ``timeout_s=None`` there is no deadline: only a node that goes away is given up.
    """

    min_nodes: Annotated[int, at_least(1, most=10**6)] = 1
    """A run begins when so many clients are there."""
    timeout_s: Annotated[float, at_least(0, most=1e300)] | None = 3600.0
    least_s: Seconds = 300.0
    slack: Annotated[float, at_least(1, most=1e6)] = 10.0
    poll_s: Seconds = 0.5
    nodes_s: Seconds = 5.0
    """Between two looks at who is connected."""
    gone_s: Seconds = 30.0
    """For an answer of the SuperLink itself. Then it is gone and the run stops; submitted again, it goes on."""

    def __post_init__(self) -> None:
        check_ranges(self)


class Patience:
    """Learns each client's runtimes. Of a client never heard from nothing is known, and the timeout is its deadline."""

    TTL_FACTOR = 3.0
    """A message past its TTL is lost at the SuperLink without a trace of the node that works on it, so the TTL lies far behind."""
    LONGEST_TTL_S = 10 * 365 * 86400.0
    """Flower needs an end that is a date."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.slowest_s: dict[int, float] = {}

    def saw(self, client: int, runtime_s: float) -> None:
        self.slowest_s[client] = max(self.slowest_s.get(client, 0.0), runtime_s)

    def deadline_s(self, client: int) -> float:
        if self.waiting.timeout_s is None:
            return inf
        if client not in self.slowest_s:
            return self.waiting.timeout_s
        return min(self.waiting.timeout_s, max(self.waiting.least_s, self.waiting.slack * self.slowest_s[client]))

    @property
    def ttl_s(self) -> float:
        """From the slowest answer, and above the timeout, for what is sent now may be awaited that long."""
        if self.waiting.timeout_s is None:
            return self.LONGEST_TTL_S
        slowest = max(self.slowest_s.values(), default=0.0)
        return min(self.LONGEST_TTL_S, self.TTL_FACTOR * max(self.waiting.timeout_s, self.waiting.slack * slowest, 60.0))


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

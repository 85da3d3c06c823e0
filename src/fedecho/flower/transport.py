"""``GridTransport``: sends dispatches to nodes as Flower messages and receives answers in real time.

Answers are matched to dispatches by message id. A dispatch past its deadline is given up, but a node works on one message at a
time, so it gets no new work until it has answered or disconnected. Since the message may be lost, the node is also sent a query
(a probe); a node that answers the probe is free.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedecho.core.server import one_line
from fedecho.core.types import Dispatch, Joined, Left, Lost, Message, Refused
from fedecho.flower.codec import Codec
from fedecho.flower.grid import (
    DEADLINE,
    NODE_GONE,
    NOT_PUSHED,
    Deadlines,
    Roster,
    SuperLink,
    Waiting,
    content_of,
    error_text,
    is_from_node,
    is_gone,
    loss_code,
)
from fedecho.flower.wire import read_introduction

TRAIN, QUERY = "train", "query"
MOST_QUERIES = 3
"""Queries to a node that does not say which client it is."""
MOST_DROPPED = 20
"""Dropped metrics that are logged by name; clients choose the names and must not fill the log."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that awaits a reply.

    ``dispatch`` is None for a query. It is also None once a dispatch is given up, so that its model is released, while
    ``client`` and ``number`` are kept.
    """

    node: int
    sent_at: float
    dispatch: Dispatch | None = None
    client: int = -1
    number: int = -1


class GridTransport:
    """The transport of a deployment.

    With ``ask``, nodes are queried for the client that they are, which ``fedecho.flower.client_app`` answers. Otherwise they are
    numbered as they connect.
    """

    def __init__(
        self,
        *,
        grid: Grid,
        codec: Codec,
        num_clients: int,
        waiting: Waiting | None = None,
        ask: bool = True,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.waiting = waiting or Waiting()
        if self.waiting.min_nodes > num_clients:
            raise ValueError(f"min_nodes is {self.waiting.min_nodes} but num_clients is only {num_clients}: lower min_nodes")
        self.roster = Roster(num_clients, say)
        self.deadlines = Deadlines(self.waiting)
        self._grid, self._codec, self._ask, self._say = SuperLink(grid, self.waiting.gone_s), codec, ask, say
        self._clock, self._sleep = clock, sleep
        self._started, self._elapsed_before = clock(), 0.0
        self._last_refresh: float | None = None
        self._last_notice: float | None = None
        self._open: dict[str, SentMessage] = {}
        self._overdue: dict[str, SentMessage] = {}
        self._queries: dict[str, SentMessage] = {}
        self._probes: dict[str, SentMessage] = {}
        self._failed_queries: dict[int, int] = {}
        self._logged_metrics: set[str] = set()
        self._ready: deque[Message] = deque()

    @property
    def now(self) -> float:
        """Real seconds since the run started, including those before a resume."""
        return self._elapsed_before + self._clock() - self._started

    def gather(self) -> list[int]:
        """Wait until ``min_nodes`` clients are connected, and return all connected clients."""
        while len(self.roster.clients) < self.waiting.min_nodes:
            self._poll()
            if len(self.roster.clients) < self.waiting.min_nodes:
                self._wait_for_nodes(self.waiting.min_nodes)
        self._ready.clear()  # clients that joined so far are present from the start
        return self.roster.clients

    def send(self, dispatch: Dispatch) -> None:
        node = self.roster.node_of(dispatch.client)
        if node is None:
            self._ready.append(Left(dispatch.client, "no node is connected for this client", NODE_GONE))
            return
        sent = SentMessage(node, self.now, dispatch, dispatch.client, dispatch.number)
        if not self._push(sent, self._codec.dispatch(dispatch), TRAIN, self._open):
            self._ready.append(Lost(dispatch.client, "the message could not be pushed to the SuperLink", NOT_PUSHED))

    def receive(self) -> Message:
        while not self._ready:
            self._poll()
            if not self._ready and self.roster.clients:
                self._sleep(self.waiting.poll_s)
            elif not self._ready:
                self._wait_for_nodes(1)
        return self._ready.popleft()

    def _wait_for_nodes(self, number: int) -> None:
        """Sleep for one polling interval, and log once a minute."""
        if self._last_notice is None or self.now - self._last_notice >= 60:
            self._say(f"waiting for clients: {len(self.roster.clients)} of {number} connected")
            self._last_notice = self.now
        self._sleep(self.waiting.poll_s)

    def _push(self, sent: SentMessage, content: RecordDict, kind: str, into: dict[str, SentMessage]) -> bool:
        group = "" if sent.dispatch is None else str(sent.dispatch.model.version + 1)
        message = FlowerMessage(content, sent.node, kind, ttl=self.deadlines.ttl_s, group_id=group)
        pushed = [number for number in self._grid.push_messages([message]) if number]
        if pushed:
            into[pushed[0]] = sent
        return bool(pushed)

    def _query(self, node: int, into: dict[str, SentMessage], client: int = -1) -> None:
        """Send a query. A node that cannot be reached is forgotten, and counts as new if it is still listed at the next refresh."""
        if not self._push(SentMessage(node, self.now, client=client), RecordDict(), QUERY, into):
            self.roster.forget(node)

    def _poll(self) -> None:
        self._refresh_nodes()
        awaited = [*self._open, *self._overdue, *self._queries, *self._probes]
        if awaited:
            for reply in self._pull(awaited):
                self._on_reply(reply)
        self._give_up_overdue()

    def _pull(self, numbers: list[str]) -> list[FlowerMessage]:
        """Pull replies. If unpacking fails, pull them one at a time, so that one malformed reply does not end the run."""
        try:
            return self._grid.pull_messages(numbers)
        except (OSError, httpx.HTTPError):
            raise  # the SuperLink failed, not an answer
        except Exception as error:  # unpacking untrusted bytes may raise anything
            if len(numbers) > 1:
                return [reply for number in numbers for reply in self._pull([number])]
            self._on_unreadable(numbers[0], error)
            return []

    def _on_unreadable(self, number: str, error: Exception) -> None:
        """Handle a reply that cannot be unpacked. It still shows that the node is free."""
        if number in self._open:
            self._ready.append(_refused(self._open.pop(number).client, error))
        elif number in self._queries:
            self._query_again(self._queries.pop(number), error)
        else:
            self._free(self._overdue.pop(number) if number in self._overdue else self._probes.pop(number))

    def _refresh_nodes(self) -> None:
        """Refresh the roster every ``nodes_s`` seconds."""
        if self._last_refresh is not None and self.now - self._last_refresh < self.waiting.nodes_s:
            return
        self._last_refresh = self.now
        change = self.roster.refresh(self._grid.get_node_ids())
        for client in change.lost_clients:
            self._on_departure(client, "its node disconnected")
        for client in self.roster.admit_waiting():
            self._ready.append(Joined(client))
        for node in change.new_nodes:
            self._on_new_node(node)

    def _on_new_node(self, node: int) -> None:
        if self._ask:
            self._query(node, self._queries)
            return
        client = self.roster.number(node)
        if client is not None and self.roster.enter(node, client):
            self._ready.append(Joined(client))

    def _on_reply(self, reply: FlowerMessage) -> None:
        number = reply.metadata.reply_to_message_id
        if number in self._queries:
            self._on_introduction(self._queries.pop(number), reply)
        elif number in self._open:
            self._on_answer(self._open.pop(number), reply)
        elif number in self._overdue:
            self._on_overdue(self._overdue.pop(number), reply)
        elif number in self._probes:
            self._on_probe_reply(self._probes.pop(number), reply)

    def _on_introduction(self, sent: SentMessage, reply: FlowerMessage) -> None:
        if is_gone(reply):
            self.roster.forget(sent.node)  # counts as new if it is still listed at the next refresh
            return
        try:
            client = read_introduction(content_of(reply))
        except Exception as error:  # untrusted records may raise anything
            self._query_again(sent, error)
            return
        if self.roster.enter(sent.node, client):
            self._say(f"client {client} connected (node {sent.node})")
            self._ready.append(Joined(client))

    def _query_again(self, sent: SentMessage, error: Exception) -> None:
        num_failed = self._failed_queries[sent.node] = self._failed_queries.get(sent.node, 0) + 1
        self._say(one_line(f"node {sent.node} did not say which client it is: {error}"))
        if num_failed < MOST_QUERIES:
            self._query(sent.node, self._queries)

    def _on_answer(self, sent: SentMessage, reply: FlowerMessage) -> None:
        dispatch = sent.dispatch
        assert dispatch is not None  # noqa: S101 (None only for queries)
        if is_gone(reply):
            self.roster.forget(sent.node)
            self._ready.append(Left(sent.client, error_text(reply), loss_code(reply)))
        elif not reply.has_content():
            self._ready.append(Lost(sent.client, error_text(reply), loss_code(reply)))
        else:
            self.deadlines.record(sent.client, self.now - sent.sent_at)
            try:
                if reply.metadata.src_node_id != sent.node:
                    raise ValueError(f"it was sent by node {reply.metadata.src_node_id}, not by node {sent.node}")
                self._ready.append(self._codec.read_answer(content_of(reply), dispatch))
                self._log_dropped(sent.client, self._codec.dropped(content_of(reply)))
            except Exception as error:  # untrusted records may raise anything
                self._ready.append(_refused(sent.client, error))

    def _log_dropped(self, client: int, dropped: Mapping[str, str]) -> None:
        """Log dropped metrics, each name once."""
        for name, why in dropped.items():
            if name not in self._logged_metrics and len(self._logged_metrics) < MOST_DROPPED:
                self._logged_metrics.add(name)
                text = f"metric {name!r} of client {client} is dropped: {why}. The update itself is used (logged once)"
                self._say(one_line(text))

    def _on_overdue(self, sent: SentMessage, reply: FlowerMessage) -> None:
        """Discard an answer past its deadline; the slot was given to another client. Only a reply by the node itself frees it."""
        if is_gone(reply):
            self.roster.forget(sent.node)
            self._drop(sent.client, self._probes)
        elif not is_from_node(reply):
            if not any(probe.client == sent.client for probe in self._probes.values()):
                self._query(sent.node, self._probes, sent.client)
        else:
            if reply.has_content():
                self.deadlines.record(sent.client, self.now - sent.sent_at)
            self._free(sent)

    def _on_probe_reply(self, sent: SentMessage, reply: FlowerMessage) -> None:
        """Free the node if it replied itself, even with an error: a custom app may not answer queries."""
        if is_gone(reply):
            self.roster.forget(sent.node)
            self._drop(sent.client, self._overdue)
        elif is_from_node(reply):
            self._free(sent)
        else:
            self._query(sent.node, self._probes, sent.client)

    def _free(self, sent: SentMessage) -> None:
        """Make a client that was given up available again."""
        self._drop(sent.client, self._overdue, self._probes)
        if self.roster.node_of(sent.client) != sent.node:
            return
        if sent.number >= 0:
            text = f"the answer to dispatch {sent.number} came after its deadline"
            self._ready.append(Lost(sent.client, text, DEADLINE))
        self._ready.append(Joined(sent.client))

    def _give_up_overdue(self) -> None:
        for number, sent in list(self._open.items()):
            deadline = self.deadlines.deadline_s(sent.client)
            if self.now - sent.sent_at > deadline:
                self._overdue[number] = replace(self._open.pop(number), dispatch=None)
                self._ready.append(Left(sent.client, f"no answer within {deadline:.0f} s", DEADLINE))
                self._query(sent.node, self._probes, sent.client)

    def _on_departure(self, client: int, reason: str) -> None:
        """Forget the open messages of a disconnected client. A later answer to them is ignored."""
        self._drop(client, self._open, self._overdue, self._probes)
        self._ready.append(Left(client, reason, NODE_GONE))

    def _drop(self, client: int, *groups: dict[str, SentMessage]) -> None:
        for group in groups:
            for number in [number for number, sent in group.items() if sent.client == client]:
                del group[number]

    def snapshot(self) -> dict[str, Any]:
        return {"elapsed": self.now, "slowest": self.deadlines.slowest_s, "numbers": self.roster.numbers}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Continue the clock. Answers to messages of the old run are ignored: the server counts open jobs as lost."""
        self._elapsed_before, self._started = tree["elapsed"], self._clock()
        self.deadlines.slowest_s = dict(tree["slowest"])
        self.roster.remember(tree["numbers"])


def _refused(client: int, error: Exception) -> Refused:
    prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return Refused(client, one_line(f"the answer cannot be read: {prefix}{error}"))

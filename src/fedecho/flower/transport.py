"""``GridTransport``: dispatches go to nodes as Flower's messages, answers come back in the order of the real clock.

Every answer is matched with its dispatch by the id of the message it replies to. A dispatch past its deadline is given up, but its
message is still listened for: the node works one message at a time and gets nothing new before it has answered or gone.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedecho.core.types import Dispatch, Joined, Left, Lost, Message, Refused
from fedecho.flower.codec import Codec
from fedecho.flower.keys import read_introduction
from fedecho.flower.replies import DEADLINE, NODE_GONE, NOT_PUSHED, content_of, error_text, is_gone, loss_code
from fedecho.flower.roster import Roster
from fedecho.flower.waiting import Patience, Waiting

TRAIN, QUERY = "train", "query"
ASK_TIMES = 3


@dataclass(frozen=True, slots=True)
class Sent:
    """A message on its way: to which node, when, and the order it carries (None: a question)."""

    node: int
    at: float
    dispatch: Dispatch | None = None


class GridTransport:
    """``ask`` nodes which client they are (``fedecho.flower.client_app`` answers); otherwise they are numbered as they come."""

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
        self.roster = Roster(num_clients, say)
        self.patience = Patience(self.waiting)
        self._grid, self._codec, self._ask, self._say = grid, codec, ask, say
        self._clock, self._sleep = clock, sleep
        self._began, self._before = clock(), 0.0
        self._looked: float | None = None
        self._said: float | None = None
        self._open: dict[str, Sent] = {}
        self._late: dict[str, Sent] = {}
        self._asked: dict[str, Sent] = {}
        self._refusals: dict[int, int] = {}
        self._ready: deque[Message] = deque()

    @property
    def now(self) -> float:
        """Real seconds, those before a resume included."""
        return self._before + self._clock() - self._began

    def gather(self) -> list[int]:
        """Wait for ``min_nodes`` clients; those that are there."""
        while len(self.roster.clients) < self.waiting.min_nodes:
            self._poll()
            if len(self.roster.clients) < self.waiting.min_nodes:
                self._wait_for_nodes(self.waiting.min_nodes)
        self._ready.clear()  # who joined until now is there from the beginning
        return self.roster.clients

    def send(self, dispatch: Dispatch) -> None:
        node = self.roster.node_of(dispatch.client)
        if node is None:
            self._ready.append(Left(dispatch.client, "no node is connected for it", NODE_GONE))
            return
        self._push(node, self._codec.dispatch(dispatch), TRAIN, self._open, dispatch)

    def receive(self) -> Message:
        while not self._ready:
            self._poll()
            if not self._ready and self.roster.clients:
                self._sleep(self.waiting.poll_s)
            elif not self._ready:
                self._wait_for_nodes(1)
        return self._ready.popleft()

    def _wait_for_nodes(self, number: int) -> None:
        """And say so, once a minute."""
        if self._said is None or self.now - self._said >= 60:
            self._say(f"{len(self.roster.clients)} of {number} clients are here; waiting")
            self._said = self.now
        self._sleep(self.waiting.poll_s)

    def _push(self, node: int, content: RecordDict, kind: str, into: dict[str, Sent], dispatch: Dispatch | None = None) -> None:
        group = "" if dispatch is None else str(dispatch.model.version + 1)
        message = FlowerMessage(content, node, kind, ttl=self.patience.ttl_s, group_id=group)
        pushed = [number for number in self._grid.push_messages([message]) if number]
        if pushed:
            into[pushed[0]] = Sent(node, self.now, dispatch)
        elif dispatch is not None:
            self._ready.append(Lost(dispatch.client, "the message could not be pushed to the SuperLink", NOT_PUSHED))

    def _poll(self) -> None:
        self._look()
        awaited = [*self._open, *self._late, *self._asked]
        if awaited:
            for reply in self._grid.pull_messages(awaited):
                self._take(reply)
        self._give_up()

    def _look(self) -> None:
        """Who came, who went: every few seconds."""
        if self._looked is not None and self.now - self._looked < self.waiting.nodes_s:
            return
        self._looked = self.now
        change = self.roster.look(self._grid.get_node_ids())
        for client in change.gone:
            self._depart(client, "its node went away")
        for client in self.roster.heirs():
            self._ready.append(Joined(client))
        for node in change.came:
            self._meet(node)

    def _meet(self, node: int) -> None:
        if self._ask:
            self._push(node, RecordDict(), QUERY, self._asked)
            return
        client = self.roster.number(node)
        if client is not None and self.roster.enter(node, client):
            self._ready.append(Joined(client))

    def _take(self, reply: FlowerMessage) -> None:
        number = reply.metadata.reply_to_message_id
        if number in self._asked:
            self._introduce(self._asked.pop(number), reply)
        elif number in self._open:
            self._answer(self._open.pop(number), reply)
        elif number in self._late:
            self._too_late(self._late.pop(number))

    def _introduce(self, sent: Sent, reply: FlowerMessage) -> None:
        try:
            client = read_introduction(content_of(reply))
        except ValueError as error:
            again = self._refusals[sent.node] = self._refusals.get(sent.node, 0) + 1
            self._say(f"node {sent.node} does not say which client it is: {error}")
            if again < ASK_TIMES and not is_gone(reply):
                self._push(sent.node, RecordDict(), QUERY, self._asked)
            return
        if self.roster.enter(sent.node, client):
            self._say(f"client {client} is here (node {sent.node})")
            self._ready.append(Joined(client))

    def _answer(self, sent: Sent, reply: FlowerMessage) -> None:
        dispatch = sent.dispatch
        assert dispatch is not None  # noqa: S101 (only questions have none)
        if is_gone(reply):
            self.roster.forget(sent.node)  # if it is still listed at the next look, it has come anew and is asked again
            self._ready.append(Left(dispatch.client, error_text(reply), loss_code(reply)))
        elif not reply.has_content():
            self._ready.append(Lost(dispatch.client, error_text(reply), loss_code(reply)))
        else:
            self.patience.saw(self.now - sent.at)
            try:
                if reply.metadata.src_node_id != sent.node:
                    raise ValueError(f"it comes from node {reply.metadata.src_node_id}, not {sent.node}")
                self._ready.append(self._codec.read_answer(reply.content, dispatch))
            except (ValueError, TypeError) as error:
                self._ready.append(Refused(dispatch.client, f"the answer cannot be read: {error}"))

    def _too_late(self, sent: Sent) -> None:
        """The node is free again; what it did counts for nothing, for its slot was given to another."""
        assert sent.dispatch is not None  # noqa: S101
        client, took = sent.dispatch.client, self.now - sent.at
        self.patience.saw(took)
        if self.roster.node_of(client) == sent.node:
            self._ready.append(Lost(client, f"answer to dispatch {sent.dispatch.number} came after its deadline"))
            self._ready.append(Joined(client))

    def _give_up(self) -> None:
        deadline = self.patience.deadline_s
        for number, sent in list(self._open.items()):
            if self.now - sent.at > deadline and sent.dispatch is not None:
                self._late[number] = self._open.pop(number)
                self._ready.append(Left(sent.dispatch.client, f"no answer within {deadline:.0f} s", DEADLINE))

    def _depart(self, client: int, reason: str) -> None:
        """Forget what a departed client had to answer; an answer that comes all the same replies to nothing we wait for."""
        for box in (self._open, self._late):
            for number, sent in list(box.items()):
                if sent.dispatch is not None and sent.dispatch.client == client:
                    del box[number]
        self._ready.append(Left(client, reason, NODE_GONE))

    def snapshot(self) -> dict[str, Any]:
        return {"elapsed": self.now, "slowest": self.patience.slowest_s}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """The clock goes on. Messages of the old run answer nothing any more: the server loses what it had open."""
        self._before, self._began = tree["elapsed"], self._clock()
        self.patience.saw(tree["slowest"])

"""``GridTransport``: dispatches go to nodes as Flower's messages, answers come back in the order of the real clock.

Every answer is matched with its dispatch by the id of the message it replies to. A dispatch past its deadline is given up, but its
message is still listened for: the node works one message at a time and gets nothing new before it has answered or gone. A question
is sent after it, for the message may have vanished: a node that answers the question is free.
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
    Patience,
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
ASK_TIMES = 3
MOST_NAMED = 20
"""Metrics that are not kept and said so: names are a client's, who must not fill the log."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message on its way: to which node, when, and the order it carries (None: a question, or an order given up).

    ``client`` and ``number`` stay known of an order given up; its model does not stay in memory.
    """

    node: int
    at: float
    dispatch: Dispatch | None = None
    client: int = -1
    number: int = -1


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
        if self.waiting.min_nodes > num_clients:
            raise ValueError(f"min_nodes = {self.waiting.min_nodes} would be waited for for ever: num_clients is {num_clients}")
        self.roster = Roster(num_clients, say)
        self.patience = Patience(self.waiting)
        self._grid, self._codec, self._ask, self._say = SuperLink(grid, self.waiting.gone_s), codec, ask, say
        self._clock, self._sleep = clock, sleep
        self._began, self._before = clock(), 0.0
        self._looked: float | None = None
        self._said: float | None = None
        self._open: dict[str, Sent] = {}
        self._late: dict[str, Sent] = {}
        self._asked: dict[str, Sent] = {}
        self._probes: dict[str, Sent] = {}
        self._refusals: dict[int, int] = {}
        self._named: set[str] = set()
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
        sent = Sent(node, self.now, dispatch, dispatch.client, dispatch.number)
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
        """And say so, once a minute."""
        if self._said is None or self.now - self._said >= 60:
            self._say(f"{len(self.roster.clients)} of {number} clients are here; waiting")
            self._said = self.now
        self._sleep(self.waiting.poll_s)

    def _push(self, sent: Sent, content: RecordDict, kind: str, into: dict[str, Sent]) -> bool:
        group = "" if sent.dispatch is None else str(sent.dispatch.model.version + 1)
        message = FlowerMessage(content, sent.node, kind, ttl=self.patience.ttl_s, group_id=group)
        pushed = [number for number in self._grid.push_messages([message]) if number]
        if pushed:
            into[pushed[0]] = sent
        return bool(pushed)

    def _question(self, node: int, into: dict[str, Sent], client: int = -1) -> None:
        """A node that cannot even be asked is forgotten; if it is still listed at the next look, it has come anew."""
        if not self._push(Sent(node, self.now, client=client), RecordDict(), QUERY, into):
            self.roster.forget(node)

    def _poll(self) -> None:
        self._look()
        awaited = [*self._open, *self._late, *self._asked, *self._probes]
        if awaited:
            for reply in self._pull(awaited):
                self._take(reply)
        self._give_up()

    def _pull(self, numbers: list[str]) -> list[FlowerMessage]:
        """One reply that cannot be unpacked must not end the run: each is then asked for by itself."""
        try:
            return self._grid.pull_messages(numbers)
        except (OSError, httpx.HTTPError):
            raise  # it is the SuperLink that fails, not an answer
        except Exception as error:  # whatever unpacking a stranger's bytes raises
            if len(numbers) > 1:
                return [reply for number in numbers for reply in self._pull([number])]
            self._unreadable(numbers[0], error)
            return []

    def _unreadable(self, number: str, error: Exception) -> None:
        """The node has spoken, if badly."""
        if number in self._open:
            self._ready.append(_refused(self._open.pop(number).client, error))
        elif number in self._asked:
            self._ask_again(self._asked.pop(number), error)
        else:
            self._free(self._late.pop(number) if number in self._late else self._probes.pop(number))

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
            self._question(node, self._asked)
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
            self._too_late(self._late.pop(number), reply)
        elif number in self._probes:
            self._probed(self._probes.pop(number), reply)

    def _introduce(self, sent: Sent, reply: FlowerMessage) -> None:
        if is_gone(reply):
            self.roster.forget(sent.node)  # if it is still listed at the next look, it has come anew and is asked again
            return
        try:
            client = read_introduction(content_of(reply))
        except Exception as error:  # a stranger's records
            self._ask_again(sent, error)
            return
        if self.roster.enter(sent.node, client):
            self._say(f"client {client} is here (node {sent.node})")
            self._ready.append(Joined(client))

    def _ask_again(self, sent: Sent, error: Exception) -> None:
        again = self._refusals[sent.node] = self._refusals.get(sent.node, 0) + 1
        self._say(one_line(f"node {sent.node} does not say which client it is: {error}"))
        if again < ASK_TIMES:
            self._question(sent.node, self._asked)

    def _answer(self, sent: Sent, reply: FlowerMessage) -> None:
        dispatch = sent.dispatch
        assert dispatch is not None  # noqa: S101 (only questions have none)
        if is_gone(reply):
            self.roster.forget(sent.node)
            self._ready.append(Left(sent.client, error_text(reply), loss_code(reply)))
        elif not reply.has_content():
            self._ready.append(Lost(sent.client, error_text(reply), loss_code(reply)))
        else:
            self.patience.saw(sent.client, self.now - sent.at)
            try:
                if reply.metadata.src_node_id != sent.node:
                    raise ValueError(f"it comes from node {reply.metadata.src_node_id}, not {sent.node}")
                self._ready.append(self._codec.read_answer(content_of(reply), dispatch))
                self._name_dropped(sent.client, self._codec.dropped(content_of(reply)))
            except Exception as error:  # whatever a stranger's records make our code raise
                self._ready.append(_refused(sent.client, error))

    def _name_dropped(self, client: int, dropped: Mapping[str, str]) -> None:
        """Once for each metric: the update counts without it."""
        for name, why in dropped.items():
            if name not in self._named and len(self._named) < MOST_NAMED:
                self._named.add(name)
                text = f"metric {name!r} of client {client} is not kept: {why}. Its update counts; this is said once"
                self._say(one_line(text))

    def _too_late(self, sent: Sent, reply: FlowerMessage) -> None:
        """What the node did counts for nothing, for its slot was given to another. Only the node's own word says it is free."""
        if is_gone(reply):
            self.roster.forget(sent.node)
            self._drop(sent.client, self._probes)
        elif not is_from_node(reply):
            if not any(probe.client == sent.client for probe in self._probes.values()):
                self._question(sent.node, self._probes, sent.client)
        else:
            if reply.has_content():
                self.patience.saw(sent.client, self.now - sent.at)
            self._free(sent)

    def _probed(self, sent: Sent, reply: FlowerMessage) -> None:
        """Any word of the node's own will do: a user's app may know no answer to questions."""
        if is_gone(reply):
            self.roster.forget(sent.node)
            self._drop(sent.client, self._late)
        elif is_from_node(reply):
            self._free(sent)
        else:
            self._question(sent.node, self._probes, sent.client)

    def _free(self, sent: Sent) -> None:
        """A client that had been given up can be chosen again."""
        self._drop(sent.client, self._late, self._probes)
        if self.roster.node_of(sent.client) != sent.node:
            return
        if sent.number >= 0:
            text = f"answer to dispatch {sent.number} came after its deadline"
            self._ready.append(Lost(sent.client, text, DEADLINE))
        self._ready.append(Joined(sent.client))

    def _give_up(self) -> None:
        for number, sent in list(self._open.items()):
            deadline = self.patience.deadline_s(sent.client)
            if self.now - sent.at > deadline:
                self._late[number] = replace(self._open.pop(number), dispatch=None)
                self._ready.append(Left(sent.client, f"no answer within {deadline:.0f} s", DEADLINE))
                self._question(sent.node, self._probes, sent.client)

    def _depart(self, client: int, reason: str) -> None:
        """Forget what a departed client had to answer; an answer that comes all the same replies to nothing we wait for."""
        self._drop(client, self._open, self._late, self._probes)
        self._ready.append(Left(client, reason, NODE_GONE))

    def _drop(self, client: int, *boxes: dict[str, Sent]) -> None:
        for box in boxes:
            for number in [number for number, sent in box.items() if sent.client == client]:
                del box[number]

    def snapshot(self) -> dict[str, Any]:
        return {"elapsed": self.now, "slowest": self.patience.slowest_s, "numbers": self.roster.numbers}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """The clock goes on. Messages of the old run answer nothing any more: the server loses what it had open."""
        self._before, self._began = tree["elapsed"], self._clock()
        self.patience.slowest_s = dict(tree["slowest"])
        self.roster.remember(tree["numbers"])


def _refused(client: int, error: Exception) -> Refused:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return Refused(client, one_line(f"the answer cannot be read: {kind}{error}"))

"""A Flower grid without a network: real messages, serialized to bytes both ways, real client apps, a virtual clock.

Answers are due when the simulator's runtimes say so, and one comes at a time: the arrivals of a simulation, through the wire.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

FIRST_NODE = 1001
Runtime = Callable[[int, int], float]
"""Of (client, dispatch)."""


def through_bytes(message: Message) -> Message:
    """As Flower ships it: every object to bytes, and again from bytes."""
    message.metadata.__dict__["_message_id"] = ""
    number = message.object_id
    contents = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(number, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = number
    return arrived


class LoopGrid(Grid):
    """Nodes 1001, 1002, ... are clients 0, 1, ...; ``spoil`` may change an answer on its way, or take it."""

    def __init__(self, app: ClientApp, num_nodes: int, runtime: Runtime, run_config: dict[str, Any]) -> None:
        self.app, self.runtime, self.run_config = app, runtime, run_config
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
        self.contexts: dict[int, Context] = {}
        self.now = 0.0
        self.spoil: Callable[[Message, Message], Message | None] = lambda order, reply: reply
        self.orders: list[Message] = []
        self._queue: list[tuple[float, int, str, Message]] = []
        self._count = 0
        for client in range(num_nodes):
            self.start_node(FIRST_NODE + client, client)

    def start_node(self, node: int, client: int) -> None:
        self.contexts[node] = Context(
            run_id=1, node_id=node, node_config={"partition-id": client}, state=RecordDict(), run_config=dict(self.run_config)
        )

    def stop_node(self, node: int) -> None:
        del self.contexts[node]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            arrived = through_bytes(message)
            self.orders.append(arrived)
            due = self.now + self._runtime(arrived)
            heapq.heappush(self._queue, (due, self._count, arrived.metadata.message_id, arrived))
            self._count += 1
            pushed.append(arrived.metadata.message_id)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The next answer, if it is asked for; what nobody asks for any more stays where it is."""
        wanted = set(message_ids)
        for entry in sorted(self._queue, key=lambda entry: entry[:2]):
            due, _, number, order = entry
            if number not in wanted:
                continue
            self._queue.remove(entry)
            heapq.heapify(self._queue)
            self.now = max(self.now, due)
            reply = self.spoil(order, self.reply_to(order))
            return [] if reply is None else [reply]
        return []

    def _runtime(self, order: Message) -> float:
        if order.metadata.message_type != "train":
            return 0.0
        config = order.content["config"]  # without these numbers in an app that is not ours
        client = config.get("client", order.metadata.dst_node_id - FIRST_NODE)
        return self.runtime(int(client), int(config.get("dispatch", self._count)))

    def reply_to(self, order: Message) -> Message:
        context = self.contexts.get(order.metadata.dst_node_id)
        if context is None:
            return Message(Error(5, "node unavailable"), reply_to=order)
        try:
            return through_bytes(self.app(message=order, context=context))
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=order)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("an asynchronous server never blocks for a round")

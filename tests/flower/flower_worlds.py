"""Small models and messages for the tests of the wire."""

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights


def module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


LAYOUT = Layout.of(module())


def weights(seed: int = 0) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    return Weights(torch.randn(LAYOUT.num_params, generator=draw), torch.rand(LAYOUT.num_buffers, generator=draw))


def dispatch(number: int = 0, client: int = 0, version: int = 0, correction: bool = False) -> Dispatch:
    model = GlobalModel(version, weights(version), weights(99).params if correction else None)
    return Dispatch(number, client, model, seed=2**62 + number)


def answer_to(order: Dispatch, seed: int = 7, correction: bool = False) -> tuple[ClientUpdate, Weights]:
    """An update and the weights y it comes from."""
    trained = weights(seed)
    update = ClientUpdate(
        order.client,
        order.model.version,
        trained.params - order.model.weights.params,
        trained.buffers,
        num_examples=11,
        num_steps=4,
        correction=weights(5).params if correction else None,
        metrics={"train_loss": 0.5},
    )
    return update, trained


class ScriptedGrid(Grid):
    """Messages stay where they are until a test answers them. Time is the test's."""

    def __init__(self, *nodes: int) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
        self.nodes = list(nodes)
        self.time = 0.0
        self.sent: list[Message] = []
        self.asked_for: set[str] = set()
        self._answers: list[Message] = []
        self.when_slept: list[Any] = []

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        """Time passes, and the next thing of the script happens."""
        assert self.when_slept, "the server waits, but nothing more will happen"
        self.time += seconds
        self.when_slept.pop(0)()

    def later(self, *steps: Any) -> None:
        self.when_slept += steps

    def orders(self, kind: str = "train") -> list[Message]:
        return [message for message in self.sent if message.metadata.message_type == kind]

    def answer(self, order: Message, content: RecordDict | None = None, code: int = 0, reason: str = "") -> None:
        self.deliver(Message(content, reply_to=order) if content is not None else Message(Error(code, reason), reply_to=order))

    def deliver(self, reply: Message) -> None:
        self._answers.append(reply)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            self.sent.append(message)
            numbers.append(message.metadata.message_id)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.asked_for = set(message_ids)
        ready = [one for one in self._answers if one.metadata.reply_to_message_id in self.asked_for]
        self._answers = [one for one in self._answers if one not in ready]
        return ready

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("an asynchronous server never blocks for a round")

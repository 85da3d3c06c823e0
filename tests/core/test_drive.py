"""The loop: which version each client is sent, and when the run ends."""

from typing import Any

import pytest
from small_server import answer_to, make_server, synchronous_server

from fedecho.algorithms import FedBuff
from fedecho.core.algorithm import Demands, demands
from fedecho.core.loop import Moment, drive
from fedecho.core.server import Server
from fedecho.core.types import Dispatch, Lost, Message


class Post:
    """Answers in the order of dispatch; notes what was sent and received as (what, dispatch, version)."""

    def __init__(self, lose: tuple[int, ...] = ()) -> None:
        self.lose, self.open, self.log, self.now = lose, [], [], 0.0

    def send(self, dispatch: Dispatch) -> None:
        self.open.append(dispatch)
        self.log.append(("send", dispatch.number, dispatch.model.version))

    def receive(self) -> Message:
        self.now += 1.0
        dispatch = self.open.pop(0)
        self.log.append(("receive", dispatch.number, dispatch.model.version))
        return Lost(dispatch.client, "dropped") if dispatch.number in self.lose else answer_to(dispatch)


def run(server: Server[Any], post: Post, num_versions: int, **options: Any) -> list[Moment]:
    moments: list[Moment] = []
    drive(server, post, num_versions=num_versions, watch=lambda moment: moments.append(moment), **options)
    return moments


def pair() -> Server[Any]:
    return make_server(num_clients=5, concurrency=2, algorithm=FedBuff(buffer_size=2))


def test_new_clients_get_the_model_from_before_the_step() -> None:
    """Lines 6 and 7 of Algorithm 1: dispatch 3, sent when the buffer is full, still holds version 0."""
    post = Post()
    run(pair(), post, 2)
    assert post.log == [
        ("send", 0, 0),
        ("send", 1, 0),
        ("receive", 0, 0),
        ("send", 2, 0),
        ("receive", 1, 0),
        ("send", 3, 0),
        ("receive", 2, 0),
        ("send", 4, 1),
        ("receive", 3, 0),
        ("send", 5, 1),
    ]


def test_dispatch_after_step_gives_the_new_model_to_whoever_completes_the_buffer() -> None:
    post = Post()
    run(pair(), post, 2, dispatch_after_step=True)
    assert post.log == [
        ("send", 0, 0),
        ("send", 1, 0),
        ("receive", 0, 0),
        ("send", 2, 0),
        ("receive", 1, 0),
        ("send", 3, 1),
        ("receive", 2, 0),
        ("send", 4, 1),
        ("receive", 3, 1),
    ]


@pytest.mark.parametrize("after", [False, True])
def test_a_synchronous_server_sends_after_the_step_in_either_order(after: bool) -> None:
    post = Post()
    run(synchronous_server(num_clients=5, concurrency=2), post, 2, dispatch_after_step=after)
    sent = [entry for entry in post.log if entry[0] == "send"]
    assert sent == [("send", 0, 0), ("send", 1, 0), ("send", 2, 1), ("send", 3, 1)]
    assert [entry[0] for entry in post.log] == ["send", "send", "receive", "receive"] * 2


def test_every_message_is_a_moment_and_every_step_is_in_one() -> None:
    post = Post(lose=(1,))
    moments = run(pair(), post, 2)
    assert [moment.time for moment in moments] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [moment.receipt.status for moment in moments] == ["accepted", "lost", "accepted", "accepted", "accepted"]
    assert [None if m.step is None else m.step.model.version for m in moments] == [None, None, 1, None, 2]


def test_a_lost_client_is_replaced_before_the_next_message() -> None:
    post = Post(lose=(0, 1, 2))
    run(pair(), post, 1)
    for place, entry in enumerate(post.log):
        if entry[0] == "receive":
            assert post.log[place + 1][0] == "send"


def test_watch_can_stop_and_the_run_can_go_on() -> None:
    server, post, seen = pair(), Post(), []

    def watch(moment: Moment) -> bool:
        seen.append(moment)
        return len(seen) == 3

    drive(server, post, num_versions=4, watch=watch)
    assert (len(seen), server.model.version) == (3, 1)
    drive(server, post, num_versions=4)
    whole = Post()
    run(pair(), whole, 4)
    assert server.model.version == 4
    assert post.log == whole.log


def test_a_watch_that_says_nothing_stops_nothing() -> None:
    server = pair()
    drive(server, Post(), num_versions=3, watch=lambda moment: None)
    assert server.model.version == 3


def test_a_run_that_is_already_over_sends_but_receives_nothing() -> None:
    post = Post()
    assert run(pair(), post, 0) == []
    assert [entry[0] for entry in post.log] == ["send", "send"]


def test_demands_of_an_algorithm_that_asks_nothing() -> None:
    assert demands(FedBuff(buffer_size=1)) == Demands(synchronous=False, proximal=0.0, control_variates=False)


def test_demands_of_another_kind_are_not_taken_for_ours() -> None:
    class Loud:
        demands = "everything"

    assert demands(Loud()) == Demands()  # type: ignore[arg-type]

"""The grid transport against a scripted grid: nodes, matching of answers, and deadlines."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import httpx
import pytest
from flower_worlds import LAYOUT, ScriptedGrid, answer_to, dispatch
from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict

from fedecho.core.types import ClientUpdate, Dispatch, Joined, Left, Lost, Refused
from fedecho.flower.codec import Codec
from fedecho.flower.grid import Deadlines, SuperLinkGoneError, Waiting
from fedecho.flower.transport import GridTransport
from fedecho.flower.wire import introduction

CODEC = Codec(LAYOUT)


def nothing() -> None:
    """Time passes."""


def transport_on(
    grid: ScriptedGrid, num_clients: int = 3, ask: bool = False, said: Any = None, **waiting: Any
) -> GridTransport:
    settings = {"min_nodes": len(grid.nodes), "poll_s": 1.0, "nodes_s": 5.0, "timeout_s": 100.0, "least_s": 10.0, **waiting}
    return GridTransport(
        grid=grid,
        codec=CODEC,
        num_clients=num_clients,
        waiting=Waiting(**settings),
        ask=ask,
        say=said or (lambda text: None),
        clock=grid.clock,
        sleep=grid.sleep,
    )


def update_for(order: Dispatch) -> RecordDict:
    return CODEC.answer(*answer_to(order))


def sent(grid: ScriptedGrid, number: int) -> FlowerMessage:
    (found,) = [order for order in grid.orders() if order.content["config"]["dispatch"] == number]
    return found


def test_answers_come_in_the_order_in_which_they_arrive() -> None:
    grid = ScriptedGrid(11, 12, 13)
    transport = transport_on(grid)
    assert transport.gather() == [0, 1, 2]
    orders = [dispatch(number, number) for number in range(3)]
    for order in orders:
        transport.send(order)
    assert [message.metadata.dst_node_id for message in grid.orders()] == [11, 12, 13]
    grid.later(
        lambda: grid.answer(sent(grid, 2), update_for(orders[2])), lambda: grid.answer(sent(grid, 0), update_for(orders[0]))
    )
    got = [transport.receive(), transport.receive()]
    assert [message.client for message in got] == [2, 0]
    assert all(isinstance(message, ClientUpdate) for message in got)
    assert transport.now == 2.0


def test_a_run_begins_when_enough_nodes_are_there() -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid, min_nodes=2)
    grid.later(nothing, lambda: grid.nodes.append(12), *[nothing] * 5)
    assert transport.gather() == [0, 1]
    assert transport.now >= 5


def test_nodes_are_asked_which_client_they_are() -> None:
    grid, said = ScriptedGrid(71, 72, 73, 74), []
    transport = transport_on(grid, num_clients=3, ask=True, said=said.append, min_nodes=2)

    def answer_all() -> None:
        asked = grid.orders("query")
        for message, partition in zip(asked, (2, 0, 2, 9), strict=True):
            grid.answer(message, introduction(partition))

    grid.later(answer_all)
    assert transport.gather() == [0, 2]
    transport.send(dispatch(0, client=2))
    assert grid.orders()[0].metadata.dst_node_id == 71, "the first that claims a number has it"
    assert any("node 73 claims to be client 2, which is node 71" in text for text in said)
    assert any("node 74 claims to be client 9, but clients are 0 to 2" in text for text in said)


def test_a_node_that_cannot_say_who_it_is_is_asked_thrice_and_left_alone() -> None:
    grid, said = ScriptedGrid(71, 72), []
    transport = transport_on(grid, ask=True, said=said.append, min_nodes=1)
    answered: set[str] = set()

    def fail() -> None:
        for message in grid.orders("query"):
            if message.metadata.dst_node_id == 72 and message.metadata.message_id not in answered:
                answered.add(message.metadata.message_id)
                grid.answer(message, code=2, reason="<class 'ValueError'>:<'no partition-id'>")

    def introduce() -> None:
        grid.answer(grid.orders("query")[0], introduction(1))

    grid.later(*[fail] * 6, introduce)
    assert transport.gather() == [1]
    assert len([message for message in grid.orders("query") if message.metadata.dst_node_id == 72]) == 3
    assert any("its app raised" in text and "no partition-id" in text for text in said)


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (
            2,
            "<class 'RuntimeError'>:<'no\nmemory'>",
            Lost(0, "its app raised: <class 'RuntimeError'>:<'no memory'>", "client failed"),
        ),
        (3, "whatever", Lost(0, "the answer expired (past its time to live)", "answer lost")),
        (5, "whatever", Left(0, "the node disconnected", "node gone")),
        (8, "killed", Lost(0, "its app crashed: killed", "client failed")),
        (77, "new", Lost(0, "error 77", "client failed")),
    ],
)
def test_errors_are_named(code: int, reason: str, expected: Lost | Left) -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid, nodes_s=1e6)
    transport.gather()
    transport.send(dispatch())
    grid.answer(grid.orders()[0], code=code, reason=reason)
    assert transport.receive() == expected


def test_an_answer_that_cannot_be_read_is_refused() -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid)
    transport.gather()
    transport.send(dispatch())
    grid.answer(grid.orders()[0], RecordDict())
    assert transport.receive() == Refused(
        0, "the answer cannot be read: record 'metrics' is missing; the message has no records"
    )


def test_a_metric_that_is_not_kept_is_said_once_and_the_update_counts() -> None:
    grid, said = ScriptedGrid(11), []
    transport = transport_on(grid, said=said.append)
    transport.gather()
    for number in range(3):
        order = dispatch(number)
        transport.send(order)
        update, trained = answer_to(order)
        grid.answer(sent(grid, number), CODEC.answer(replace(update, metrics={"loss": float("nan"), "f1": 0.5}), trained))
        got = transport.receive()
        assert isinstance(got, ClientUpdate)
        assert got.metrics == {"f1": 0.5}
    assert said == ["metric 'loss' of client 0 is dropped: it is nan. The update itself is used (logged once)"]


def test_an_answer_from_another_node_is_refused() -> None:
    grid = ScriptedGrid(11, 12)
    transport = transport_on(grid)
    transport.gather()
    order = dispatch()
    transport.send(order)
    message = grid.orders()[0]
    message.metadata.__dict__["_dst_node_id"] = 12
    grid.answer(message, update_for(order))
    got = transport.receive()
    assert isinstance(got, Refused)
    assert "sent by node 12, not by node 11" in got.reason


def test_a_late_answer_never_closes_a_newer_dispatch() -> None:
    """Same client, same base version: only the message's id tells them apart."""
    grid = ScriptedGrid(11)
    transport = transport_on(grid, timeout_s=3.0)
    transport.gather()
    first, second = dispatch(0), dispatch(1)
    transport.send(first)
    grid.later(*[nothing] * 4)
    assert transport.receive() == Left(0, "no answer within 3 s", "deadline")
    assert len(grid.orders()) == 1, "a busy node gets nothing new"
    grid.later(nothing, lambda: grid.answer(sent(grid, 0), update_for(first)))
    late = transport.receive()
    assert late == Lost(0, "the answer to dispatch 0 came after its deadline", "deadline")
    assert transport.receive() == Joined(0), "only now it is free"
    transport.send(second)
    grid.answer(sent(grid, 0), update_for(first))  # once more, as a broken node may
    grid.later(lambda: grid.answer(sent(grid, 1), update_for(second)))
    got = transport.receive()
    assert isinstance(got, ClientUpdate)
    assert grid.asked_for == {sent(grid, 1).metadata.message_id}, "nobody asks for the old one any more"


def test_a_node_that_goes_away_and_another_that_takes_its_place() -> None:
    grid = ScriptedGrid(11, 12)
    transport = transport_on(grid, num_clients=2)
    transport.gather()
    order = dispatch(0, client=1)
    transport.send(order)
    grid.later(lambda: grid.nodes.remove(12), *[nothing] * 4)
    assert transport.receive() == Left(1, "its node disconnected", "node gone")
    grid.answer(sent(grid, 0), update_for(order))
    grid.later(lambda: grid.nodes.append(13), *[nothing] * 5)
    assert transport.receive() == Joined(1), "the update of the node that went is not asked for"
    transport.send(dispatch(1, client=1))
    assert sent(grid, 1).metadata.dst_node_id == 13


def test_a_node_started_anew_waits_until_its_former_self_is_gone() -> None:
    grid = ScriptedGrid(71)
    transport = transport_on(grid, num_clients=1, ask=True)
    grid.later(lambda: grid.answer(grid.orders("query")[0], introduction(0)))
    transport.gather()
    transport.send(dispatch())
    grid.later(lambda: grid.nodes.append(72), *[nothing] * 5, lambda: grid.answer(grid.orders("query")[1], introduction(0)))
    grid.later(lambda: grid.nodes.remove(71), *[nothing] * 6)
    assert transport.receive() == Left(0, "its node disconnected", "node gone")
    assert transport.receive() == Joined(0)
    transport.send(dispatch(1))
    assert sent(grid, 1).metadata.dst_node_id == 72


def test_a_node_that_cannot_be_asked_and_was_started_anew_gets_work_when_its_former_self_is_gone() -> None:
    grid = ScriptedGrid(71)
    transport = transport_on(grid, num_clients=1)
    transport.gather()
    transport.send(dispatch())
    grid.later(lambda: grid.nodes.append(72), *[nothing] * 6, lambda: grid.nodes.remove(71), *[nothing] * 6)
    assert transport.receive() == Left(0, "its node disconnected", "node gone")
    assert transport.receive() == Joined(0)
    transport.send(dispatch(1))
    assert sent(grid, 1).metadata.dst_node_id == 72


def test_a_dispatch_for_an_absent_client_comes_back_at_once() -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid)
    transport.gather()
    transport.send(dispatch(0, client=2))
    assert transport.receive() == Left(2, "no node is connected for this client", "node gone")
    assert grid.orders() == []


def test_a_message_that_cannot_be_pushed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid)
    transport.gather()
    monkeypatch.setattr(grid, "push_messages", lambda messages: [])
    transport.send(dispatch())
    assert transport.receive() == Lost(0, "the message could not be pushed to the SuperLink", "not pushed")


def test_deadlines_learn_from_each_clients_runtimes_and_the_ttl_lies_above_them() -> None:
    waiting = Waiting(timeout_s=1000, least_s=20, slack=10)
    deadlines = Deadlines(waiting)
    assert deadlines.deadline_s(0) == 1000, "nothing is known yet"
    deadlines.record(0, 1.0)
    assert deadlines.deadline_s(0) == 20
    assert deadlines.deadline_s(1) == 1000, "a fast neighbour says nothing of a client never heard from"
    deadlines.record(0, 5.0)
    deadlines.record(0, 2.0)
    assert deadlines.deadline_s(0) == 50
    assert deadlines.ttl_s == 3000
    deadlines.record(1, 700.0)
    assert deadlines.deadline_s(1) == 1000
    assert deadlines.ttl_s == 21000


def test_the_ttl_is_on_the_message() -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid)
    transport.gather()
    transport.send(dispatch())
    assert grid.orders()[0].metadata.ttl == 300.0


@pytest.mark.parametrize(("field", "value"), [("min_nodes", 0), ("timeout_s", -1.0), ("slack", 0.5), ("poll_s", float("inf"))])
def test_waiting_says_what_is_wrong(field: str, value: float) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"{field} must be at (least|most)"):
        Waiting(**settings)


def test_the_clock_goes_on_after_a_resume() -> None:
    grid = ScriptedGrid(11)
    before = transport_on(grid)
    grid.time = 42.0
    before.deadlines.record(0, 7.0)
    after = transport_on(grid)
    after.restore(before.snapshot())
    grid.time = 50.0
    assert after.now == 50.0
    assert after.deadlines.slowest_s == {0: 7.0}


def given_up(grid: ScriptedGrid, ask: bool = False, order: Dispatch | None = None) -> GridTransport:
    """A transport whose one client has let its deadline of 3 s pass."""
    transport = transport_on(grid, num_clients=1, ask=ask, timeout_s=3.0)
    if ask:
        grid.later(lambda: grid.answer(grid.orders("query")[0], introduction(0)))
    transport.gather()
    transport.send(order or dispatch())
    grid.later(*[nothing] * 4)
    assert transport.receive() == Left(0, "no answer within 3 s", "deadline")
    return transport


@pytest.mark.parametrize("answered", ["well", "badly"])
def test_a_node_whose_message_vanished_is_free_when_it_answers_a_question(answered: str) -> None:
    grid = ScriptedGrid(11)
    transport = given_up(grid)
    (question,) = grid.orders("query")
    assert question.metadata.dst_node_id == 11
    if answered == "well":
        grid.later(lambda: grid.answer(question, introduction(0)))
    else:
        grid.later(lambda: grid.answer(question, code=2, reason="no query function"))
    assert transport.receive() == Joined(0)
    transport.send(dispatch(1))
    grid.answer(sent(grid, 0), update_for(dispatch()))
    grid.later(lambda: grid.answer(sent(grid, 1), update_for(dispatch(1))))
    assert isinstance(transport.receive(), ClientUpdate)
    assert grid.asked_for == {sent(grid, 1).metadata.message_id}, "the old order is not asked for any more"


def test_what_is_given_up_keeps_no_model_in_memory() -> None:
    order = dispatch()
    params = weakref.ref(order.model.weights.params)
    transport = given_up(ScriptedGrid(11), order=order)
    del order
    gc.collect()
    assert params() is None
    assert transport.roster.clients == [0], "its node is known, and may still answer"


def test_a_late_word_that_the_node_is_gone_frees_nobody() -> None:
    grid = ScriptedGrid(11)
    transport = given_up(grid)
    grid.nodes.clear()
    grid.answer(sent(grid, 0), code=5)
    grid.later(nothing, nothing, lambda: grid.nodes.append(12), *[nothing] * 6)
    assert transport.receive() == Joined(0)
    assert transport.roster.node_of(0) == 12, "it is the new node that joined"
    assert transport.deadlines.slowest_s == {}


def test_an_expired_order_frees_a_node_only_when_it_answers_itself() -> None:
    grid = ScriptedGrid(11)
    transport = given_up(grid)
    grid.answer(sent(grid, 0), code=3)
    grid.answer(grid.orders("query")[0], code=3)
    grid.later(*[nothing] * 3, lambda: grid.answer(grid.orders("query")[1], introduction(0)))
    assert transport.receive() == Joined(0)
    assert grid.when_slept == [], "not before the second question was answered"
    assert transport.deadlines.slowest_s == {}


def test_a_probe_that_finds_the_node_gone_lets_it_come_anew() -> None:
    grid = ScriptedGrid(11)
    transport = given_up(grid)
    grid.answer(grid.orders("query")[0], code=5)
    grid.later(*[nothing] * 6)
    assert transport.receive() == Joined(0), "still listed at the next look, so it has come anew"


@pytest.mark.parametrize("how", ["gone", "not pushed"])
def test_a_question_that_comes_to_nothing_is_asked_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ScriptedGrid(71)
    transport = transport_on(grid, ask=True)
    push, failures = grid.push_messages, [how == "not pushed"]
    monkeypatch.setattr(grid, "push_messages", lambda messages: [] if failures and failures.pop() else push(messages))
    if how == "gone":
        grid.later(lambda: grid.answer(grid.orders("query")[0], code=5))
    grid.later(*[nothing] * 6, lambda: grid.answer(grid.orders("query")[-1], introduction(2)))
    assert transport.gather() == [2]


def test_more_nodes_than_there_are_clients_are_never_waited_for() -> None:
    with pytest.raises(ValueError, match="min_nodes is 4 but num_clients is only 3"):
        transport_on(ScriptedGrid(), min_nodes=4)


def test_nodes_that_cannot_be_asked_keep_their_numbers_after_a_resume() -> None:
    before = transport_on(ScriptedGrid(13, 11, 12))
    before.gather()
    tree = before.snapshot()
    after = transport_on(ScriptedGrid(12, 13))
    after.restore(tree)
    assert after.gather() == [1, 2]
    assert [after.roster.node_of(client) for client in (0, 1, 2)] == [None, 12, 13]


def test_one_answer_that_cannot_be_unpacked_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ScriptedGrid(11, 12)
    transport = transport_on(grid)
    transport.gather()
    orders = [dispatch(0, 0), dispatch(1, 1)]
    for order in orders:
        transport.send(order)
    bad, pull = sent(grid, 0).metadata.message_id, grid.pull_messages

    def unpack(numbers: Any) -> Any:
        if bad in numbers:
            raise KeyError("DecodeError")
        return pull(numbers)

    monkeypatch.setattr(grid, "pull_messages", unpack)
    grid.answer(sent(grid, 1), update_for(orders[1]))
    assert transport.receive() == Refused(0, "the answer cannot be read: KeyError: 'DecodeError'")
    assert isinstance(transport.receive(), ClientUpdate)


def test_a_superlink_that_fails_is_no_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid)
    transport.gather()
    transport.send(dispatch())

    def fail(numbers: Any) -> Any:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(grid, "pull_messages", fail)
    with pytest.raises(SuperLinkGoneError, match="refused"):
        transport.receive()


def test_content_that_is_no_records_is_refused() -> None:
    grid = ScriptedGrid(11)
    transport = transport_on(grid)
    transport.gather()
    transport.send(dispatch())
    reply = FlowerMessage(RecordDict(), reply_to=grid.orders()[0])
    reply.__dict__["_content"] = ["no", "records"]
    grid.deliver(reply)
    got = transport.receive()
    assert isinstance(got, Refused)
    assert got.reason == "the answer cannot be read: the content is a list, not a RecordDict"

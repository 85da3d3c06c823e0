"""The server's view of its clients: busy, idle or away."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from small_server import answer, answer_to, contents, good_update, make_server, synchronous_server

from fedecho.algorithms import FedBuff
from fedecho.core.randomness import derive
from fedecho.core.types import Joined, Left, Lost, Message, Refused


def test_distinct_clients_are_given_work_up_to_the_concurrency() -> None:
    server = make_server(num_clients=9, concurrency=4)
    dispatches = server.refill()
    assert [d.number for d in dispatches] == [0, 1, 2, 3]
    assert len({d.client for d in dispatches}) == 4
    assert all(d.model is server.model for d in dispatches)
    assert [d.seed for d in dispatches] == [derive(0, "job", number) for number in range(4)]
    assert server.refill() == []


@pytest.mark.parametrize("concurrency", [0, -1, 6])
def test_a_concurrency_that_cannot_be_is_refused(concurrency: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and num_clients = 5, got {concurrency}"):
        make_server(num_clients=5, concurrency=concurrency)


def test_picks_are_uniform_over_the_idle() -> None:
    """First picks over 3,000 seeds: chi-square with 5 degrees of freedom, below 20.5 but for one time in a thousand."""
    picks = Counter(make_server(num_clients=6, concurrency=1, seed=seed).refill()[0].client for seed in range(3000))
    assert sum((picks[client] - 500) ** 2 / 500 for client in range(6)) < 20.5


def test_an_accepted_client_may_be_picked_again_at_once() -> None:
    server = make_server(num_clients=3, concurrency=3)
    dispatch = server.refill()[1]
    assert server.receive(answer_to(dispatch)).status == "accepted"
    (again,) = server.refill()
    assert (again.client, again.number) == (dispatch.client, 3)


def test_a_lost_client_is_replaced_at_once() -> None:
    server = make_server(num_clients=5, concurrency=3)
    lost = server.refill()[0]
    before = contents(server.state)
    receipt = server.receive(Lost(lost.client, "battery"))
    assert (receipt.status, receipt.reason, receipt.dispatch) == ("lost", "battery", 0)
    assert (server.counts["lost"], server.reasons["lost"]) == (1, 1)
    (replacement,) = server.refill()
    assert replacement.number == 3
    assert len(server.open) == 3
    assert contents(server.state) == before


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Lost, "lost"),
        (Left, "client went away"),
        (Refused, "unreadable"),
        (lambda client, text: Lost(client, text, "client failed"), "client failed"),
        (lambda client, text: Refused(client, text, "garbled"), "garbled"),
    ],
)
def test_losses_are_counted_by_code_whatever_their_texts_say(kind: Callable[[int, str], Message], code: str) -> None:
    server = make_server(num_clients=5, concurrency=1)
    for number in range(30):
        (dispatch,) = server.refill()
        receipt = server.receive(kind(dispatch.client, f"battery at {number} %"))
        assert (receipt.reason[:15], receipt.code) == (f"battery at {number} %"[:15], code)
        server.receive(Joined(dispatch.client))
    assert server.reasons == {code: 30}


@pytest.mark.parametrize("kind", [Lost, Left, Refused])
def test_a_message_without_a_code_is_refused_where_it_is_made(kind: Callable[..., Message]) -> None:
    with pytest.raises(ValueError, match="from client 3 must be a non-empty string, got ''"):
        kind(3, "battery", "")


def test_a_code_from_a_users_transport_is_kept_short_and_plain() -> None:
    server = make_server(num_clients=5, concurrency=1)
    server.receive(Lost(server.refill()[0].client, "battery", "b\n" * 1000))
    (code,) = server.reasons
    assert len(code) == 60
    assert code.isprintable()


def test_a_late_answer_of_a_lost_client_is_refused() -> None:
    server = make_server(num_clients=5, concurrency=1)
    (dispatch,) = server.refill()
    server.receive(Lost(dispatch.client, "timeout"))
    assert server.receive(answer_to(dispatch)).reason == "update was not asked for"


@pytest.mark.parametrize("away", [False, True])
def test_losing_a_client_that_has_no_work_is_ignored(away: bool) -> None:
    server = make_server(num_clients=5, concurrency=1)
    (dispatch,) = server.refill()
    other = (dispatch.client + 1) % 5
    if away:
        server.receive(Left(other))
    receipt = server.receive(Lost(other, "late news"))
    assert (receipt.status, receipt.reason) == ("ignored", "late news")
    assert (other in server.idle) != away
    assert server.reasons == {}


def test_an_idle_client_that_left_is_not_picked_until_it_joins() -> None:
    server = make_server(num_clients=3, concurrency=3)
    assert server.receive(Left(1)).status == "left"
    assert sorted(d.client for d in server.refill()) == [0, 2]
    assert server.refill() == []
    assert server.receive(Joined(1)).status == "joined"
    assert [d.client for d in server.refill()] == [1]


def test_a_client_that_leaves_at_work_loses_its_job() -> None:
    server = make_server(num_clients=5, concurrency=3)
    leaver = server.refill()[0]
    receipt = server.receive(Left(leaver.client))
    assert (receipt.status, receipt.reason, receipt.dispatch) == ("lost", "client went away", leaver.number)
    assert leaver.client not in server.idle
    for _ in range(20):
        for dispatch in server.refill():
            assert dispatch.client != leaver.client
        server.receive(Lost(next(iter(server.open)), "next"))
    assert server.receive(answer_to(leaver)).reason == "update was not asked for"
    assert leaver.client not in server.idle, "an unwanted answer does not bring a client back"


def test_leaving_twice_and_joining_twice_is_leaving_once_and_joining_once() -> None:
    server = make_server(num_clients=3, concurrency=1)
    for _ in range(2):
        assert server.receive(Left(2)).status == "left"
        assert sorted(server.idle.ordered()) == [0, 1]
    for _ in range(2):
        assert server.receive(Joined(2)).status == "joined"
        assert sorted(server.idle.ordered()) == [0, 1, 2]


def test_joining_while_at_work_is_ignored() -> None:
    server = make_server(num_clients=3, concurrency=1)
    (dispatch,) = server.refill()
    receipt = server.receive(Joined(dispatch.client))
    assert (receipt.status, receipt.reason) == ("ignored", "joined while at work")
    assert dispatch.client not in server.idle
    assert dispatch.client in server.open


def test_with_everybody_away_nobody_is_sent_work() -> None:
    server = make_server(num_clients=2, concurrency=2)
    for client in range(2):
        server.receive(Left(client))
    assert server.refill() == []
    server.receive(Joined(0))
    assert [d.client for d in server.refill()] == [0]


def test_a_synchronous_server_waits_for_the_whole_buffer() -> None:
    server = synchronous_server(num_clients=6, concurrency=3)
    picked = server.refill()
    for dispatch in picked:
        assert not server.ready
        assert server.refill() == []
        assert server.receive(answer_to(dispatch)).status == "accepted"
        assert server.receive(Joined(dispatch.client)).status == "ignored"
    assert server.ready
    assert server.refill() == []
    server.advance()
    assert [d.model.version for d in server.refill()] == [1, 1, 1]


def test_a_synchronous_server_picks_nobody_twice_in_a_round() -> None:
    """Every other answer is lost, so that clients are replaced in the middle of a round."""
    server = synchronous_server(num_clients=4, concurrency=3)
    queue, heard, turn = server.refill(), [], 0
    while server.model.version < 30:
        dispatch = queue.pop(0)
        turn += 1
        if turn % 2:
            server.receive(Lost(dispatch.client, "dropped"))
        else:
            receipt = server.receive(answer_to(dispatch))
            assert (receipt.status, receipt.staleness) == ("accepted", 0)
            heard.append(dispatch.client)
        queue += server.refill()
        if server.ready:
            assert len(set(heard)) == len(heard) == 3
            server.advance()
            heard.clear()
            queue += server.refill()


def test_a_client_that_has_reported_and_leaves_keeps_its_place_in_the_round() -> None:
    """Its update is in the buffer: with another client in its place, one of them would be late for the round."""
    server = synchronous_server(num_clients=5, concurrency=2)
    first, second = server.refill()
    server.receive(answer_to(first))
    server.receive(Left(first.client))
    assert server.refill() == [], "new work was sent before the buffer was full"
    server.receive(answer_to(second))
    server.advance()
    assert first.client not in server.idle, "who is away is not picked in the next round"
    assert all(d.model.version == 1 for d in server.refill())


def test_a_client_that_reported_left_and_joined_is_not_picked_twice_in_a_round() -> None:
    server = synchronous_server(num_clients=2, concurrency=2)
    first, second = server.refill()
    server.receive(answer_to(first))
    server.receive(Left(first.client))
    server.receive(Joined(first.client))
    assert server.refill() == []
    server.receive(Left(second.client))
    assert server.refill() == [], "the place of the second is free, and the first has had its turn"


def test_advancing_publishes_the_next_version_and_keeps_the_old_one_for_those_who_train_from_it() -> None:
    server = make_server(num_clients=4, concurrency=2, algorithm=FedBuff(buffer_size=1))
    slow, quick = server.refill()
    base = server.model
    server.receive(good_update(quick.client, 0))
    step = server.advance()
    assert (step.model.version, server.model) == (1, step.model)
    assert torch.equal(step.model.weights.params, base.weights.params + good_update(0, 0).delta)
    assert server.versions.models[0] is base
    receipt = server.receive(answer(server, slow.client))
    assert (receipt.status, receipt.staleness, receipt.base_version) == ("accepted", 1, 0)
    assert server.versions.num_alive == 1

"""The running median of norms beside a plain one, and clients that are set aside."""

from collections import deque
from statistics import median_high
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_server import answer, make_server

from fedecho.algorithms import FedBuff
from fedecho.core.admission import Admission
from fedecho.core.gate import Gate
from fedecho.core.server import Open, Server
from fedecho.core.types import CLIENT_FAILED, Joined, Left, Lost, Refused


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_median_is_that_of_the_last_window(norms: list[float]) -> None:
    gate, window = Gate(Admission(norm_window=20)), deque[float](maxlen=20)
    for norm in norms:
        gate.accepted(0, norm)
        window.append(norm)
        assert gate.median() == (None if len(window) < 2 else median_high(window) or None)
    again = Gate(gate.admission).from_tree(gate.to_tree())
    assert again.median() == gate.median()


def served(server: Server[Any], client: int, **changes: Any) -> Any:
    return server.receive(answer(server, client, **changes))


def test_a_norm_far_above_the_usual_is_refused_once_the_usual_is_known() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=100), admission=Admission(max_norm_ratio=10.0, norm_window=20))
    huge = torch.tensor([1e5, 0.0, 0.0])
    assert served(server, server.refill()[0].client, delta=huge).status == "accepted"  # nothing is usual yet
    for _ in range(4):
        assert served(server, server.refill()[-1].client).status == "accepted"
    refused = served(server, server.refill()[-1].client, delta=huge)
    assert (refused.status, refused.code) == ("rejected", "norm")
    assert "above 10 times the median 1.146" in refused.reason


def bad_client(server: Server[Any], strikes: int) -> int:
    """A client that is refused so often in a row; the others stay at work."""
    client = server.refill()[0].client
    for _ in range(strikes):
        assert served(server, client, num_steps=0).status == "rejected"
        if client not in server.idle:
            break
        server.idle.remove(client)
        for other in list(server.idle.ordered()):
            server.idle.remove(other)
        server.idle.add(client)
        server.refill()
    return client


BOUNDS = Admission(max_strikes=3, set_aside_versions=2)


def test_a_client_refused_three_times_in_a_row_is_set_aside_for_two_versions() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), admission=BOUNDS)
    client = bad_client(server, 3)
    assert server.gate.set_aside == {client: 2}
    assert client not in server.idle
    for version in (1, 2):
        served(server, next(iter(server.open)))
        server.advance()
        assert (client in server.idle) == (version == 2)


def test_a_good_update_wipes_the_strikes_away() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=10), admission=BOUNDS)
    client = bad_client(server, 2)
    assert served(server, client).status == "accepted"
    assert server.gate.strikes == {}


def test_going_away_and_coming_back_wins_nothing() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), admission=BOUNDS)
    client = bad_client(server, 3)
    assert server.receive(Left(client)).status == "left"
    assert server.receive(Joined(client)).reason == "set aside until version 2"
    assert client not in server.idle


@pytest.mark.parametrize("comes_back", [False, True])
def test_who_left_while_set_aside_is_idle_only_after_joining(comes_back: bool) -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), admission=BOUNDS)
    client = bad_client(server, 3)
    server.receive(Left(client))
    for _ in range(2):
        served(server, next(iter(server.open)))
        server.advance()
    assert client not in server.idle
    if comes_back:
        assert server.receive(Joined(client)).status == "joined"
        assert client in server.idle


def test_a_server_with_nobody_else_takes_those_set_aside() -> None:
    server = make_server(num_clients=1, concurrency=1, algorithm=FedBuff(buffer_size=1), admission=BOUNDS)
    bad_client(server, 3)
    assert [dispatch.client for dispatch in server.refill()] == [0]


def test_no_strikes_sets_nobody_aside() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), admission=Admission(max_strikes=0))
    bad_client(server, 20)
    assert server.gate.set_aside == {}


def test_a_client_that_fails_by_itself_is_set_aside_as_one_that_is_refused() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), admission=BOUNDS)
    client = server.refill()[0].client
    for time in range(3):
        receipt = server.receive(Lost(client, "it raised", CLIENT_FAILED))
        assert (receipt.status, receipt.code) == ("lost", CLIENT_FAILED)
        if time < 2:
            server.idle.remove(client)
            server.open[client] = Open(99, server.versions.acquire().version)
    assert receipt.reason == "it raised; the client is set aside until version 2"
    assert server.gate.set_aside == {client: 2}
    assert client not in server.idle
    assert server.reasons == {CLIENT_FAILED: 3}


def test_a_loss_that_is_not_the_clients_doing_is_no_strike() -> None:
    server = make_server(admission=BOUNDS)
    for _ in range(20):
        server.receive(Lost(server.refill()[0].client if not server.open else next(iter(server.open)), "gone", "node gone"))
        server.refill()
    assert server.gate.strikes == {}
    assert server.gate.set_aside == {}


def test_a_clients_text_is_one_short_line() -> None:
    server = make_server(admission=BOUNDS)
    for text in ("a\nb\x1b[31mc", "x" * 10_000):
        client = server.refill()[0].client if not server.open else next(iter(server.open))
        reason = server.receive(Refused(client, text)).reason
        assert len(reason) <= 300
        assert reason.isprintable()
    assert server.reasons == {"unreadable": 2}

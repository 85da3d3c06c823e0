"""The running median of norms against a plain one, and clients that are set aside."""

from collections import deque
from statistics import median_high, median_low
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_server import answer, make_server

from fedecho.algorithms import FedBuff
from fedecho.core.admission import Admission
from fedecho.core.norm_monitor import LargestNorms, NormWindow
from fedecho.core.server import OpenJob, Server
from fedecho.core.types import CLIENT_FAILED, Joined, Left, Lost, Refused
from fedecho.storage.checkpoint import decode, encode


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_median_is_that_of_the_last_window(norms: list[float]) -> None:
    ours, window = NormWindow(20), deque[float](maxlen=20)
    for norm in norms:
        ours.add(norm)
        window.append(norm)
        assert ours.median() == (None if len(window) < 2 else median_high(window) or None)
    again = NormWindow(20).from_tree(ours.to_tree())
    assert again.median() == ours.median()


def served(server: Server[Any], client: int, **changes: Any) -> Any:
    return server.receive(answer(server, client, **changes))


def test_a_norm_far_above_the_usual_is_refused_once_the_usual_is_known() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=100), admission=Admission(max_norm_ratio=10.0, norm_window=20))
    huge = torch.tensor([30.0, 0.0, 0.0])
    assert served(server, server.refill()[0].client, delta=huge).status == "accepted"  # nothing is usual yet
    for _ in range(4):
        assert served(server, server.refill()[-1].client).status == "accepted"
    refused = served(server, server.refill()[-1].client, delta=huge)
    assert (refused.status, refused.code) == ("rejected", "norm")
    assert "above 10 times the usual norm 1.146" in refused.reason


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
    assert server.norm_monitor.set_aside == {client: 2}
    assert client not in server.idle
    for version in (1, 2):
        served(server, next(iter(server.open)))
        server.advance()
        assert (client in server.idle) == (version == 2)


def test_a_good_update_wipes_the_strikes_away() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=10), admission=BOUNDS)
    client = bad_client(server, 2)
    assert served(server, client).status == "accepted"
    assert server.norm_monitor.strikes == {}


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
    assert server.norm_monitor.set_aside == {}


def test_a_client_that_fails_by_itself_is_set_aside_as_one_that_is_refused() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), admission=BOUNDS)
    client = server.refill()[0].client
    for time in range(3):
        receipt = server.receive(Lost(client, "it raised", CLIENT_FAILED))
        assert (receipt.status, receipt.code) == ("lost", CLIENT_FAILED)
        if time < 2:
            server.idle.remove(client)
            server.open[client] = OpenJob(99, server.versions.acquire().version)
    assert receipt.reason == "it raised; the client is set aside until version 2"
    assert server.norm_monitor.set_aside == {client: 2}
    assert client not in server.idle
    assert server.reasons == {CLIENT_FAILED: 3}


def test_a_loss_that_is_not_the_clients_doing_is_no_strike() -> None:
    server = make_server(admission=BOUNDS)
    for _ in range(20):
        server.receive(Lost(server.refill()[0].client if not server.open else next(iter(server.open)), "gone", "node gone"))
        server.refill()
    assert server.norm_monitor.strikes == {}
    assert server.norm_monitor.set_aside == {}


def test_a_clients_text_is_one_short_line() -> None:
    server = make_server(admission=BOUNDS)
    for text in ("a\nb\x1b[31mc", "x" * 10_000):
        client = server.refill()[0].client if not server.open else next(iter(server.open))
        reason = server.receive(Refused(client, text)).reason
        assert len(reason) <= 300
        assert reason.isprintable()
    assert server.reasons == {"unreadable": 2}


def offered(server: Server[Any], client: int, **changes: Any) -> str:
    """The code of the refusal of an update of this client, or none."""
    while client not in server.open:
        server.idle.add(client)
        for other in [other for other in server.idle.ordered() if other != client]:
            server.idle.remove(other)
        server.refill()
    return served(server, client, **changes).code


def far(size: int, norm: float) -> torch.Tensor:
    return torch.tensor([norm] + [0.0] * (size - 1))


PARTS = {"delta": (3, "norm"), "buffers": (2, "statistics"), "correction": (3, "correction norm")}


@pytest.mark.parametrize("part", PARTS)
def test_the_very_first_report_is_bounded_by_the_scale_of_the_model(part: str) -> None:
    size, code = PARTS[part]
    for norm, expected in ((1e3, code), (1e18, code), (1e30, "not finite" if part == "delta" else code), (100.0, "")):
        assert offered(make_server(algorithm=FedBuff(buffer_size=9)), 0, **{part: far(size, norm)}) == expected


@pytest.mark.parametrize("part", PARTS)
def test_one_client_alone_never_decides_what_is_usual(part: str) -> None:
    """However often and however early it reports; the others are never refused."""
    server = make_server(algorithm=FedBuff(buffer_size=500), num_clients=5, concurrency=5, admission=Admission(max_strikes=0))
    size, code = PARTS[part]
    for norm in (1e4, 1e-9, 1e12, 1e6):
        assert offered(server, 0, **{part: far(size, norm)}) == (code if norm > 1 else "")
    for round_ in range(60):
        assert offered(server, 0, **{part: far(size, 1e6)}) == code, round_
        for client in (1, 2, 3, 4):
            assert offered(server, client) == "", round_


@pytest.mark.parametrize("part", ["buffers", "correction"])
def test_what_most_clients_send_is_usual_however_large_it_is(part: str) -> None:
    """Inputs that nobody scaled give statistics of a million: the first three reports are lost, and the run goes on."""
    size, code = PARTS[part]
    for num_clients, lost in ((5, 3), (3, 2), (2, 1)):
        server = make_server(algorithm=FedBuff(buffer_size=500), num_clients=num_clients, concurrency=num_clients)
        codes = [offered(server, client % num_clients, **{part: far(size, 1e6 + client)}) for client in range(50)]
        assert codes == [code] * lost + [""] * (50 - lost)


@pytest.mark.parametrize("part", PARTS)
def test_a_client_without_others_is_compared_with_nobody(part: str) -> None:
    """A run of one client, as a baseline, on inputs that nobody scaled; what is not finite is refused all the same."""
    server = make_server(algorithm=FedBuff(buffer_size=500), num_clients=1, concurrency=1)
    size, _ = PARTS[part]
    assert [offered(server, 0, **{part: far(size, 1e6)}) for _ in range(15)] == [""] * 15
    assert offered(server, 0, **{part: far(size, float("nan"))}) == "not finite"


@pytest.mark.parametrize("part", PARTS)
def test_two_clients_that_come_first_do_not_vouch_for_each_other(part: str) -> None:
    server = make_server(algorithm=FedBuff(buffer_size=500), num_clients=6, concurrency=6)
    size, code = PARTS[part]
    for _ in range(2):
        assert [offered(server, client, **{part: far(size, 1e9)}) for client in (0, 1)] == [code, code]
    assert [offered(server, client) for client in (2, 3, 4, 5)] == [""] * 4
    assert offered(server, 0, **{part: far(size, 1e9)}) == code


def test_a_straggler_may_move_as_far_as_all_did_at_first() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=5000), num_clients=5, concurrency=5)
    for client in range(5):
        assert offered(server, client, buffers=far(2, 300.0)) == ""
    for client in range(1000):
        assert offered(server, client % 4, buffers=torch.tensor([0.25, 4.001]), correction=far(3, 1e-5)) == ""
    assert offered(server, 4, buffers=far(2, 280.0)) == ""


def test_the_bounds_on_everything_outlive_a_resume() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=500), num_clients=5, concurrency=5)
    for client in range(5):
        offered(server, client, buffers=far(2, 3e4 + client), correction=far(3, 1e-3))
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(server.snapshot(), tensors)
    again = make_server(algorithm=FedBuff(buffer_size=500), num_clients=5, concurrency=5)
    again.restore(decode(tree, tensors, again.snapshot()))
    for each in (server, again):
        assert offered(each, 4, buffers=far(2, 1e6), correction=far(3, 0.01)) == ""
        assert offered(each, 4, buffers=far(2, 1e8)) == "statistics"
        assert offered(each, 4, correction=far(3, 1.0)) == "correction norm"


def test_max_norm_bounds_statistics_and_corrections_too() -> None:
    for part, (size, code) in PARTS.items():
        server = make_server(algorithm=FedBuff(buffer_size=9), admission=Admission(max_norm=50.0, max_norm_ratio=None))
        assert offered(server, 0, **{part: far(size, 60.0)}) == code
        assert offered(server, 0, **{part: far(size, 40.0)}) == ""


def test_no_bound_is_no_bound() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=9), admission=Admission(max_norm_ratio=None))
    assert offered(server, 0, delta=far(3, 1e9), buffers=far(2, 1e9), correction=far(3, 1e9)) == ""


@given(st.lists(st.tuples(st.integers(0, 7), st.floats(0.0, 1e6)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_votes_are_the_largest_norm_of_each_of_the_last_clients(reports: list[tuple[int, float]]) -> None:
    votes, largest = LargestNorms(5), dict[int, float]()
    for client, norm in reports:
        others = [theirs for other, theirs in largest.items() if other != client]
        assert votes.median_of_others(client) == (median_low(others) if others else 0.0)
        votes.add(client, norm)
        largest[client] = max(norm, largest.pop(client, 0.0))
        if len(largest) > 5:
            del largest[next(iter(largest))]
        again = LargestNorms(5).from_tree(votes.to_tree())
        assert (again.largest, again.median_of_others(9)) == (largest, votes.median_of_others(9))

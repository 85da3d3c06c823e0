"""Every reason for a rejection, and that a rejection changes nothing but the slot."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_server import answer, contents, good_update, make_server

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedBuff
from fedecho.core.admission import Admission
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Joined, Left, Lost

NAN, INF = float("nan"), float("inf")
BOUNDS = Admission(max_norm=100.0, max_examples=1000, max_steps=500, max_metrics=2, max_bytes=1000)

CODES = {"update is": "wrong base", "shape": "wrong shape", "dtype": "wrong dtype", "not finite": "not finite", "norm": "norm"}
CODES |= {"num_examples": "num_examples", "num_steps": "num_steps", "correction is missing": "correction", "metric": "metrics"}
CODES |= {"bytes": "too large", "sparse": "wrong kind", "meta": "wrong kind", "gradients": "wrong kind"}


def code_of(reason: str) -> str:
    """The word by which a reason is counted."""
    (found,) = {code for word, code in CODES.items() if word in reason and not (code == "not finite" and "metric" in reason)}
    return found


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "base from the future": ({"base_version": 1}, "update is based on version 1, not 0"),
    "base never sent": ({"base_version": -1}, "update is based on version -1, not 0"),
    "delta too short": ({"delta": torch.ones(2)}, "delta has shape (2,), not (3,)"),
    "delta not flat": ({"delta": torch.ones(3, 1)}, "delta has shape (3, 1), not (3,)"),
    "delta empty": ({"delta": torch.ones(0)}, "delta has shape (0,), not (3,)"),
    "delta in float64": ({"delta": torch.ones(3).double()}, "delta has dtype torch.float64, not torch.float32"),
    "delta of whole numbers": ({"delta": torch.ones(3).long()}, "delta has dtype torch.int64, not torch.float32"),
    "buffers too long": ({"buffers": torch.ones(3)}, "buffers has shape (3,), not (2,)"),
    "buffers in float16": ({"buffers": torch.ones(2).half()}, "buffers has dtype torch.float16, not torch.float32"),
    "correction too long": ({"correction": torch.ones(4)}, "correction has shape (4,), not (3,)"),
    "correction in float64": ({"correction": torch.ones(3).double()}, "correction has dtype torch.float64, not torch.float32"),
    "NaN in delta": ({"delta": torch.tensor([0.0, NAN, 1.0])}, "delta is not finite"),
    "inf in delta": ({"delta": torch.tensor([0.0, 1.0, INF])}, "delta is not finite"),
    "-inf in delta": ({"delta": torch.tensor([-INF, 1.0, 0.0])}, "delta is not finite"),
    "inf - inf in delta": ({"delta": torch.tensor([INF, -INF, 0.0])}, "delta is not finite"),
    "NaN in buffers": ({"buffers": torch.tensor([NAN, 1.0])}, "buffers are not finite"),
    "inf in buffers": ({"buffers": torch.tensor([1.0, INF])}, "buffers are not finite"),
    "NaN in correction": ({"correction": torch.tensor([NAN, 1.0, 1.0])}, "correction is not finite"),
    "inf in correction": ({"correction": torch.tensor([1.0, 1.0, -INF])}, "correction is not finite"),
    "norm above the bound": ({"delta": torch.tensor([0.0, 60.0, 81.0])}, "delta's norm 100.8 is above the bound 100"),
    "no examples": ({"num_examples": 0}, "num_examples 0 is not above 0 and at most 1000"),
    "minus examples": ({"num_examples": -5}, "num_examples -5 is not above 0 and at most 1000"),
    "too many examples": ({"num_examples": 1001}, "num_examples 1001 is not above 0 and at most 1000"),
    "no steps": ({"num_steps": 0}, "num_steps 0 is outside 1 to 500"),
    "too many steps": ({"num_steps": 501}, "num_steps 501 is outside 1 to 500"),
    "examples that are no number": ({"num_examples": "7"}, "num_examples 7 is not above 0 and at most 1000"),
    "examples that are NaN": ({"num_examples": float("nan")}, "num_examples nan is not above 0 and at most 1000"),
    "examples that are true": ({"num_examples": True}, "num_examples True is not above 0 and at most 1000"),
    "a metric that is not finite": ({"metrics": {"loss": NAN}}, "metric 'loss' is not a finite number"),
    "a metric that is no number": ({"metrics": {"loss": "low"}}, "metric 'loss' is not a finite number"),
    "too many metrics": ({"metrics": dict.fromkeys("abc", 1.0)}, "there are 3 metrics, more than 2"),
    "a metric with a long name": ({"metrics": {"m" * 101: 1.0}}, "a metric's name is not a string of at most 100 characters"),
    "a delta that asks for gradients": ({"delta": torch.ones(3, requires_grad=True)}, "delta still requires gradients"),
    "a sparse delta": (
        {"delta": torch.ones(3).to_sparse()},
        "delta is torch.sparse_coo on cpu, not torch.strided on cpu",
    ),
    "a delta without data": (
        {"delta": torch.ones(3, device="meta")},
        "delta is torch.strided on meta, not torch.strided on cpu",
    ),
    "too many bytes": ({"delta": torch.ones(300)}, "update has 1220 bytes, more than 1000"),
}

METHODS: dict[str, Callable[[], Any]] = {
    "fedbuff": lambda: FedBuff(buffer_size=3),
    "fadas": lambda: FADAS(buffer_size=3),
    "ca2fl": lambda: CA2FL(buffer_size=3, num_clients=5),
    "fedac": lambda: FedAC(buffer_size=3, num_clients=5),
}


def busy_server(algorithm: Any) -> Server[Any]:
    """Two accepted updates wait in the buffer, so that there is something to spoil."""
    server = make_server(algorithm=algorithm, concurrency=3, admission=BOUNDS)
    for _ in range(2):
        client = server.refill()[0].client
        assert server.receive(answer(server, client)).status == "accepted"
    server.refill()
    return server


def _odd(tensor: torch.Tensor) -> bool:
    return tensor.is_sparse or tensor.is_meta


def assert_rejected(server: Server[Any], update: ClientUpdate, reason: str) -> None:
    """The reason is said and counted, the state and every model keep their bits, and the slot is filled again."""
    before = contents({"state": server.state, "model": server.model})
    readable = [tensor for tensor in (update.delta, update.buffers, update.correction) if tensor is None or not _odd(tensor)]
    given_bits = contents(readable)
    work = server.open[update.client]
    receipt = server.receive(update)
    assert (receipt.status, receipt.client, receipt.reason) == ("rejected", update.client, reason)
    assert (receipt.dispatch, receipt.base_version, receipt.staleness) == (work.number, work.base_version, 0)
    assert (receipt.norm, receipt.metrics) == (0.0, {}), "nothing an untrusted update says is passed on"
    assert contents({"state": server.state, "model": server.model}) == before
    assert contents(readable) == given_bits
    assert update.client not in server.open
    assert update.client in server.idle
    assert (server.counts["rejected"], receipt.code, server.reasons[receipt.code]) == (1, code_of(reason), 1)
    (replacement,) = server.refill()
    assert replacement.number == server.num_dispatched - 1
    assert len(server.open) == server.concurrency


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_changes_nothing_but_its_slot(fault: str, method: str) -> None:
    server = busy_server(METHODS[method]())
    changes, reason = FAULTS[fault]
    assert_rejected(server, answer(server, min(server.open), **changes), reason)


def test_a_missing_correction_is_refused_where_it_is_wanted() -> None:
    server = busy_server(FedAC(buffer_size=3, num_clients=5))
    assert_rejected(server, answer(server, min(server.open), correction=None), "correction is missing")


def test_a_missing_correction_is_fine_where_nobody_asked_for_it() -> None:
    server = busy_server(FedBuff(buffer_size=3))
    assert server.receive(answer(server, min(server.open), correction=None)).status == "accepted"


@pytest.mark.parametrize("changes", [{"num_examples": 1}, {"num_examples": 1000}, {"num_steps": 1}])
def test_the_ends_of_the_allowed_ranges_are_let_in(changes: dict[str, int]) -> None:
    server = busy_server(FedBuff(buffer_size=3))
    assert server.receive(answer(server, min(server.open), **changes)).status == "accepted"


def test_a_norm_at_the_bound_is_let_in_and_reported() -> None:
    server = busy_server(FedBuff(buffer_size=3))
    receipt = server.receive(answer(server, min(server.open), delta=torch.tensor([60.0, 0.0, -80.0])))
    assert (receipt.status, receipt.norm) == ("accepted", 100.0)
    assert receipt.metrics == {"train_loss": 1.0}


def test_an_update_nobody_asked_for_is_refused() -> None:
    server = busy_server(FedBuff(buffer_size=3))
    stranger = next(client for client in range(5) if client not in server.open)
    before, open_before = contents(server.state), dict(server.open)
    receipt = server.receive(good_update(stranger, 0))
    assert (receipt.status, receipt.reason, receipt.dispatch) == ("rejected", "update was not asked for", -1)
    assert contents(server.state) == before
    assert server.open == open_before
    assert server.refill() == []


def test_the_same_update_twice_counts_once() -> None:
    server = busy_server(FedBuff(buffer_size=3))
    update = answer(server, min(server.open))
    assert server.receive(update).status == "accepted"
    assert server.receive(update).reason == "update was not asked for"
    assert server.state.size == 3


@pytest.mark.parametrize("client", [-1, 5, 2**40])
@pytest.mark.parametrize("kind", [lambda c: good_update(c, 0), lambda c: Lost(c, "gone"), Joined, Left])
def test_messages_of_unknown_clients_are_refused(kind: Callable[[int], Any], client: int) -> None:
    server = busy_server(FedBuff(buffer_size=3))
    before = contents(server.snapshot() | {"counts": None, "reasons": None})
    receipt = server.receive(kind(client))
    assert (receipt.status, receipt.reason) == ("rejected", f"client {client} is unknown")
    assert contents(server.snapshot() | {"counts": None, "reasons": None}) == before
    assert server.refill() == []


finite = st.floats(-(2.0**60), 2.0**60, width=32)


@given(st.lists(finite, min_size=3, max_size=3), st.sampled_from([NAN, INF, -INF]), st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_one_entry_that_is_not_finite_is_enough(values: list[float], poison: float, place: int) -> None:
    """Whatever the other entries are: large ones of both signs must not hide it."""
    values[place] = poison
    server = make_server(admission=Admission(max_norm=None))
    client = server.refill()[0].client
    receipt = server.receive(answer(server, client, delta=torch.tensor(values)))
    assert receipt.reason == "delta is not finite"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"max_norm": 0.0}, r"max_norm must be above 0, got 0.0"),
        ({"max_norm": -1.0}, r"max_norm must be above 0, got -1.0"),
        ({"max_norm": NAN}, r"max_norm must be above 0, got nan"),
        ({"max_examples": 0}, r"max_examples must be at least 1, got 0"),
        ({"max_steps": 0}, r"max_steps must be at least 1, got 0"),
        ({"max_bytes": 0}, r"max_bytes must be at least 1, got 0"),
        ({"norm_window": 9}, r"norm_window must be at least 10, got 9"),
        ({"max_norm_ratio": 0.9}, r"max_norm_ratio must be at least 1, got 0.9"),
        ({"max_metrics": -1}, r"max_metrics must be at least 0, got -1"),
        ({"max_strikes": -1}, r"max_strikes must be at least 0, got -1"),
        ({"set_aside_versions": -1}, r"set_aside_versions must be at least 0, got -1"),
    ],
)
def test_bounds_that_let_nobody_in_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Admission(**settings_)


def test_staleness_of_a_refused_update_is_reported() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), concurrency=2)
    slow, quick = server.refill()
    server.receive(good_update(quick.client, 0))
    server.advance()
    receipt = server.receive(replace(good_update(slow.client, 0), num_steps=0))
    assert (receipt.status, receipt.staleness) == ("rejected", 1)


@pytest.mark.parametrize(("buffers", "code"), [([1.0, -1.0], "variance"), ([1.0, -1e-30], "variance"), ([-1.0, 0.0], "")])
def test_a_variance_below_zero_is_refused_and_a_mean_may_be(buffers: list[float], code: str) -> None:
    server = make_server(variances=torch.tensor([False, True]))
    receipt = server.receive(answer(server, server.refill()[0].client, buffers=torch.tensor(buffers)))
    assert receipt.code == code
    assert not code or f"a variance is {buffers[1]:.4g}, below 0" in receipt.reason

"""Real processes on loopback: a SuperLink, six SuperNodes, FedEcho. ``pytest -m network`` runs them; minutes each."""

import json
from pathlib import Path

import pytest
from networks import CHAOS, DIGITS, arrivals, kill_server_app, lines, secured, simulated_mean, wait_until

from fedecho.flower.local_federation import LocalFederation
from fedecho.runs.summary import Summary

pytestmark = pytest.mark.network

SLOW = {4: 10.0, 5: 20.0}
"""Seconds that two of the six nodes take longer."""


def pause(client: int) -> dict[str, float] | None:
    return {"pause-s": SLOW[client]} if client in SLOW else None


def check_run(run: Path) -> None:
    summary = Summary.read(run)
    assert summary.num_versions == 30
    assert summary.accepted == 90
    done = arrivals(run)
    assert len({line["dispatch"] for line in done}) == 90
    straggler = [line["staleness"] for line in done if line["client"] == 5]
    assert straggler, "the slowest client contributes"
    fast = [line["staleness"] for line in done if line["client"] not in SLOW]
    assert sum(straggler) / len(straggler) > sum(fast) / len(fast)
    expected = simulated_mean(run, range(3))
    told = {
        "accuracy": summary.last10_accuracy,
        "simulator": expected,
        "mean_staleness": summary.mean_staleness,
        "max_staleness": summary.max_staleness,
        "straggler": straggler,
        "seconds": summary.real_s,
    }
    print(json.dumps(told))
    assert abs(summary.last10_accuracy - expected) < 0.03


def test_six_nodes_learn_what_the_simulator_learns(tmp_path: Path) -> None:
    with LocalFederation(tmp_path / "logs") as federation:
        for client in range(6):
            federation.start_node(client, pause(client))
        federation.control.follow(federation.control.submit(DIGITS, {"out": str(tmp_path / "run")}))
    check_run(tmp_path / "run")


def test_the_same_with_tls_and_authenticated_nodes(tmp_path: Path) -> None:
    """And a node whose key nobody registered gets nothing."""
    tls, keys = secured(tmp_path / "keys", 7)
    with LocalFederation(tmp_path / "logs", tls, authenticate=True) as federation:
        for key in keys[:6]:
            federation.control.register(key)
        for client in range(6):
            federation.start_node(client, pause(client), private_key=keys[client].with_suffix(""))
        federation.start_node(0, private_key=keys[6].with_suffix(""), name="stranger")
        federation.start_node(1, name="keyless")
        federation.control.follow(federation.control.submit(DIGITS, {"out": str(tmp_path / "run")}))
        for name in ("stranger", "keyless"):
            assert federation.nodes[name].wait(60) != 0
            said = (tmp_path / "logs" / f"{name}.log").read_text()
            assert "Failed to initialize the connection to the SuperLink" in said, said
            assert "Receiving" not in said
    check_run(tmp_path / "run")


def test_chaos(tmp_path: Path) -> None:
    """A node is killed and comes again, the server is killed and submitted again, clients raise, send NaN and wrong sizes.

    24 versions, so that the killed node is back before the end.
    """
    run, faults = tmp_path / "run", {2: "size", 3: "exception", 4: "nan"}
    with LocalFederation(tmp_path / "logs") as federation:
        for client in range(6):
            settings = {"fault": faults[client]} if client in faults else {"pause-s": 4.0} if client == 1 else None
            federation.start_node(client, settings)
        first = federation.control.submit(CHAOS, {"out": str(run)})
        wait_until(lambda: len(lines(run, "version")) >= 2, 200, "two versions")
        federation.kill_node("node1")
        federation.start_node(1, {"pause-s": 4.0})
        wait_until(lambda: any(line["client"] == 1 for line in arrivals(run, "lost")), 200, "the killed node is noticed")
        wait_until(lambda: any(line["client"] == 1 for line in arrivals(run, "joined")), 200, "it is back")
        kill_server_app(federation)
        before = len(lines(run, "version"))
        wait_until(lambda: federation.control.status(first)[0] == "finished:failed", 200, "Flower sees that the server is dead")
        federation.control.follow(federation.control.submit(CHAOS, {"out": str(run)}))
    summary, done = Summary.read(run), arrivals(run)
    reasons = " | ".join(line.get("reason", "") for line in lines(run, "arrival"))
    print(json.dumps({"versions_before_the_kill": before, "reasons": summary.reasons, "seconds": summary.real_s}))
    assert [line["version"] for line in lines(run, "version")] == list(range(1, 25))
    assert summary.accepted == len(done) == len({line["dispatch"] for line in done}) == 72
    for named in (
        "the chaos client fails",
        "must have shape",
        "delta is not finite",
        "disconnected",
        "in flight when the server",
    ):
        assert named in reasons, named
    assert any(line["client"] == 1 for line in done)

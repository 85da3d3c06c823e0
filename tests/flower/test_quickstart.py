"""Flower's PyTorch quickstart made asynchronous by the three documented lines, its network and client untouched."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import APPS, arrivals, lines, log_of
from safetensors.torch import load_file

from fedecho.flower.launch import RunFailedError
from fedecho.flower.local_federation import LocalFederation
from fedecho.runs.summary import Summary

pytestmark = pytest.mark.network

QUICKSTART = APPS / "quickstart"
VERSIONS = 12
Federation = Callable[[Path], Any]


@contextmanager
def three_nodes(logs: Path) -> Iterator[tuple[LocalFederation, list[str]]]:
    """A real SuperLink and a process for every node."""
    with LocalFederation(logs) as federation:
        for client in range(3):
            federation.start_node(client, {"num-partitions": 3})
        yield federation, []


@contextmanager
def simulation_engine(logs: Path) -> Iterator[tuple[LocalFederation, list[str]]]:
    pytest.importorskip("ray")
    with LocalFederation(logs, simulation=True) as federation:
        yield federation, ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"]


@pytest.mark.parametrize("method", ["fedbuff", "fedecho"])
@pytest.mark.parametrize("federation", [three_nodes, simulation_engine], ids=lambda made: made.__name__)
def test_quickstart_learns_and_its_model_loads_strictly(
    federation: Federation, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(QUICKSTART)
    from quickstart.task import Net, images, test

    folder = tmp_path / "run"
    config = {"method": method, "folder": str(folder), "num-server-rounds": VERSIONS}
    with federation(tmp_path / "logs") as (started, options):
        run = started.control.submit(QUICKSTART, config, options)
        started.control.follow(run, every_s=1)
        log = log_of(started, run)
    summary = Summary.read(folder)
    curve = [line["accuracy"] for line in lines(folder, "evaluation")]
    print(json.dumps({"accuracy": curve, "seconds": summary.real_s, "staleness": summary.mean_staleness}))
    assert (summary.num_versions, summary.accepted) == (VERSIONS, 2 * VERSIONS)
    assert {line["client"] for line in arrivals(folder)} == {0, 1, 2}
    assert {line["num-examples"] for line in arrivals(folder)} == {48, 192, 720}
    rows = torch.utils.data.DataLoader(images(1000, seed=77), batch_size=100)
    for state in (torch.load(folder / "final_model.pt", weights_only=True), load_file(folder / "model.safetensors")):
        net = Net()
        net.load_state_dict(state, strict=True)
        assert test(net, rows, torch.device("cpu"))[1] == pytest.approx(summary.final_accuracy, abs=0.002)
    assert max(curve) > 0.5, "a tenth is chance"
    assert "weighted by examples" in log
    assert f"finished: {VERSIONS} versions" in log


def test_where_every_client_crashes_the_run_ends_soon_and_says_why(tmp_path: Path) -> None:
    """Three nodes whose app cannot load its data."""
    config = {"folder": str(tmp_path / "run"), "num-server-rounds": 100, "batch-size": 0}
    words = r"every connected client failed in the same way \(client failed\); the last one: its app raised: .*batch_size"
    with three_nodes(tmp_path / "logs") as (started, _):
        run = started.control.submit(QUICKSTART, config)
        with pytest.raises(RunFailedError, match=words):
            started.control.follow(run, every_s=1)
        log = log_of(started, run)
    assert log.count("further 'client failed' failures are only counted") == 1
    assert log.count(": lost, its app raised:") == 3
    (jobs,) = re.findall(r"stopped at version 0 of 100: 0 updates accepted, 0 rejected, (\d+) lost \(client failed \1\)", log)
    lost = arrivals(tmp_path / "run", "lost")
    print(json.dumps({"jobs": int(jobs), "seconds": lost[-1]["time"]}))
    assert len(lost) == int(jobs) <= 20

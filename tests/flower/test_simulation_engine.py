"""Our ServerApp and ClientApp on Flower's own simulation engine, which needs Ray: ``pip install 'fedecho[flower-simulation]'``."""

from pathlib import Path

import pytest
from networks import DIGITS, arrivals

from fedecho.flower.local_federation import LocalFederation
from fedecho.runs.summary import Summary

pytestmark = pytest.mark.network


def test_flwr_run_on_the_simulation_engine_finishes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    config = {"out": str(tmp_path / "run"), "versions": 5}
    resources = "num-supernodes=6 client-resources-num-cpus=1 init-args-num-cpus=2"
    with LocalFederation(tmp_path / "logs", simulation=True) as federation:
        federation.control.follow(federation.control.submit(DIGITS, config, ["--federation-config", resources]))
    summary = Summary.read(tmp_path / "run")
    assert (summary.num_versions, summary.accepted) == (5, 15)
    assert {line["client"] for line in arrivals(tmp_path / "run")} <= set(range(6))
    assert summary.final_accuracy > 0.5

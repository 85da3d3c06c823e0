"""The same arrivals through VirtualTransport and through GridTransport with real Flower messages: bit-equal models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from loop_grid import LoopGrid
from torch import nn

from fedecho import ALGORITHMS, DigitsTask, Experiment, IidPartitioner, load, simulate
from fedecho.core.types import Dispatch, GlobalModel
from fedecho.flower import Waiting, make_client_app
from fedecho.flower.codec import Codec
from fedecho.flower.server_app import run_experiment
from fedecho.flower.worker import work
from fedecho.learning.privacy import Privacy
from fedecho.learning.trainer import Trainer
from fedecho.runs.build import bound_network
from fedecho.runs.record import read_record

CONFIG = {"worker": False}
MADE: dict[str, Experiment] = {}


def made(run_config: dict[str, Any]) -> Experiment:
    """What the client's app is told to train (``module:function``)."""
    return MADE["now"]


def small(name: str) -> Experiment:
    experiment = load(
        "digits", algorithm=name, versions=8, settings=["task.num_clients=8", "concurrency=3", "local.num_local_steps=4"]
    )
    concurrency = 3 if name == "fedavg" else 5
    task = DigitsTask(num_clients=8, num_unlabeled=40, width=2, partition=IidPartitioner())
    return replace(experiment, task=task, concurrency=concurrency, eval_every=1)


def over_the_loop(experiment: Experiment, folder: Path | None = None) -> Any:
    MADE["now"] = experiment
    sizes = [experiment.task.num_examples(client) for client in range(experiment.task.num_clients)]
    runtimes = experiment.runtimes.assign(sizes, experiment.seed)
    app = make_client_app(f"{__name__}:made")
    grid = LoopGrid(app, experiment.task.num_clients, runtimes.draw, CONFIG | {"key": experiment.name + str(id(experiment))})
    waiting = Waiting(min_nodes=experiment.task.num_clients, poll_s=0, nodes_s=1e6)
    return run_experiment(grid, experiment, waiting, folder)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_simulator_equals_wire_to_the_last_bit(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    experiment = small(name)
    simulated = simulate(experiment, out=tmp_path / "simulated")
    summary = over_the_loop(experiment, tmp_path / "wired")
    assert summary.model_sha256 == simulated.summary.model_sha256
    ours, theirs = (
        [line for line in read_record(tmp_path / kind) if line["event"] == "arrival"] for kind in ("wired", "simulated")
    )
    for one, other in zip(ours, theirs, strict=True):
        for key in ("client", "dispatch", "base", "staleness", "norm", "train_loss"):
            assert one[key] == other[key], key
    assert simulated.weights.buffers.numel() > 0
    assert (tmp_path / "wired" / "model.safetensors").read_bytes() == (
        tmp_path / "simulated" / "model.safetensors"
    ).read_bytes()
    if name == "fedac":
        assert len({line["client"] for line in ours}) < len(ours), "somebody trains twice, so its c_i counts"


def test_private_noise_is_the_clients_secret_and_nothing_else_is_sent(tmp_path: Path) -> None:
    """The server knows every seed it hands out, so the same run twice must not give the same noise."""
    experiment = replace(small("fedbuff"), num_versions=2, privacy=Privacy(clip_norm=1.0, noise_multiplier=0.1))
    first, second = (over_the_loop(experiment, tmp_path / name) for name in ("a", "b"))
    assert first.model_sha256 != second.model_sha256
    assert first.privacy["largest_epsilon"] > 0
    done = [line for line in read_record(tmp_path / "a") if line.get("status") == "accepted"]
    assert done
    assert all("train_loss" not in line for line in done)


@pytest.mark.parametrize("private", [False, True])
def test_a_private_clients_exception_does_not_quote_data(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "train", lambda *parts: (_ for _ in ()).throw(ValueError("row 3: Jane Doe")))
    privacy = Privacy(clip_norm=1.0, noise_multiplier=0.1) if private else Privacy()
    MADE["now"] = experiment = replace(small("fedbuff"), privacy=privacy)
    network = bound_network(experiment.task, experiment.seed)
    order = Dispatch(0, 0, GlobalModel(0, network.layout.pack(network.module)), 1)
    with pytest.raises(Exception, match="ValueError" if private else "Jane Doe") as caught:
        work(f"{__name__}:made", {"key": f"private {private}"}, Codec(network.layout).dispatch(order), RecordDict())
    assert ("Jane" in str(caught.value)) != private


class Forgetful(DigitsTask):
    """Its evaluation does not switch gradients off by itself."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        graphs = self.logits(module, torch.arange(2)).requires_grad
        return {"accuracy": 1.0, "graphs": float(graphs), "grad_mode": float(torch.is_grad_enabled())}


def test_the_servers_evaluation_needs_no_gradients(tmp_path: Path) -> None:
    task = Forgetful(num_clients=8, num_unlabeled=40, width=2, partition=IidPartitioner())
    over_the_loop(replace(small("fedbuff"), task=task, num_versions=2), tmp_path)
    scores = [line for line in read_record(tmp_path) if line["event"] == "evaluation"]
    assert scores
    assert all((line["graphs"], line["grad_mode"]) == (0.0, 0.0) for line in scores)

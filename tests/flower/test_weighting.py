"""Clients are weighted by their numbers of examples, as in Flower's own strategies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from loop_grid import LoopGrid
from torch import nn

from fedecho import CA2FL, FADAS, Distiller, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.flower import AsyncStrategy, Waiting
from fedecho.runs.record import read_header, read_record

EXAMPLES = (10, 990)
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Client 0 comes back with zeros, client 1 with ones."""
    client = int(context.node_config["partition-id"])
    arrays = ArrayRecord({"weight": torch.full((1, 1), float(client))})
    metrics = MetricRecord({"train_loss": float(client), "num-examples": EXAMPLES[client]})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Blocking(LoopGrid):
    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return [reply for number in list(self.push_messages(list(messages))) for reply in self.pull_messages([number])]


def grid() -> Blocking:
    return Blocking(app, 2, lambda client, number: 1.0, {})


def averaged(algorithm: Any, **options: Any) -> tuple[float, float]:
    """The model and the training loss after one version of two updates."""
    waiting = Waiting(min_nodes=2, poll_s=0, nodes_s=1e6)
    strategy = AsyncStrategy(algorithm=algorithm, num_clients=2, waiting=waiting, **options)
    result = strategy.start(grid(), ArrayRecord({"weight": torch.zeros(1, 1)}), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert "num-examples" not in metrics
    return float(result.arrays["weight"].numpy()[0, 0]), float(metrics["train_loss"])


def test_flowers_fedavg_gives_the_same_mean_and_metrics() -> None:
    flowers = FlowerFedAvg(fraction_evaluate=0.0, min_available_nodes=2, min_train_nodes=2)
    theirs = flowers.start(grid(), ArrayRecord({"weight": torch.zeros(1, 1)}), num_rounds=1)
    assert theirs.arrays["weight"].numpy() == pytest.approx(0.99)
    weight, loss = averaged(FedAvg(buffer_size=2))
    assert weight == pytest.approx(0.99)
    assert loss == pytest.approx(theirs.train_metrics_clientapp[1]["train_loss"]) == pytest.approx(0.99)


def test_weighted_is_the_default_and_off_leaves_the_algorithm_as_it_is() -> None:
    module = nn.Linear(1, 1, bias=False)
    with_u = {"module": module, "unlabeled": torch.zeros(4, 1)}
    echo = FedEcho(inner=FedBuff(buffer_size=2), distiller=Distiller(num_distill_steps=0))
    for algorithm, options in ((FedBuff(buffer_size=2), {}), (echo, with_u)):
        assert averaged(algorithm, **options)[0] == pytest.approx(0.99)
        assert averaged(algorithm, weighted=False, **options)[0] == pytest.approx(0.5)
    assert averaged(FedBuff(buffer_size=2, weighted=True), weighted=False)[0] == pytest.approx(0.99)
    assert averaged(FedBuff(buffer_size=2), weighted=False)[1] == pytest.approx(0.99), "metrics are Flower's"


def test_a_method_that_takes_no_mean_or_a_robust_one_stays_as_it_is() -> None:
    for algorithm in (
        FedAsync(mixing=0.5),
        CA2FL(buffer_size=2, num_clients=2),
        FedBuff(buffer_size=2, combine="median"),
        FADAS(buffer_size=2, combine="trimmed"),
    ):
        np.testing.assert_equal(averaged(algorithm)[0], averaged(algorithm, weighted=False)[0])
    assert averaged(FedBuff(buffer_size=2, combine="clipped"))[0] < 0.9
    assert averaged(FADAS(buffer_size=2, server_lr=0.1))[0] > 0


@pytest.mark.parametrize("weighted", [True, False])
def test_the_record_says_how_clients_count(weighted: bool, tmp_path: Path) -> None:
    averaged(FedBuff(buffer_size=2), weighted=weighted, folder=tmp_path)
    header = read_header(tmp_path)
    assert header["config"] is not None
    assert header["config"]["algorithm"]["weighted"] is weighted
    assert {line["num-examples"] for line in read_record(tmp_path) if line["event"] == "arrival"} == set(EXAMPLES)

"""The short one, in every run of the tests: real processes on loopback, then the same arrivals once more without them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from networks import DIGITS, arrivals, lines

from fedecho.core.loop import drive
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Joined, Left, Message
from fedecho.distill.student import Student
from fedecho.flower.local_federation import LocalFederation
from fedecho.learning.trainer import Trainer
from fedecho.runs.build import bound_network
from fedecho.runs.config import from_config
from fedecho.runs.identity import model_digest
from fedecho.runs.record import read_header
from fedecho.runs.summary import Summary

SETTINGS = "task.num_clients=3 concurrency=2 task.width=4 task.num_unlabeled=60 local.num_local_steps=3 "
SETTINGS += "algorithm.inner.buffer_size=1 eval_every=1"


class Replay:
    """Gives a server the messages of a record, in their order, from clients trained here and now."""

    def __init__(self, told: Iterator[dict[str, Any]], trainer: Trainer) -> None:
        self.told, self.trainer, self.open = told, trainer, dict[int, Dispatch]()
        self.now = 0.0

    def send(self, dispatch: Dispatch) -> None:
        self.open[dispatch.client] = dispatch

    def receive(self) -> Message:
        line = next(self.told)
        if line["status"] == "accepted":
            update: ClientUpdate = self.trainer.train(self.open.pop(line["client"]))
            return update
        return {"joined": Joined, "left": Left}[line["status"]](line["client"])


def test_two_nodes_and_a_server_learn_what_one_process_learns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with LocalFederation(tmp_path / "logs") as federation:
        for client in (0, 2):
            federation.start_node(client)
        config = {"out": str(run), "versions": 3, "min-nodes": 2, "settings": SETTINGS}
        federation.control.follow(federation.control.submit(DIGITS, config), every_s=1)
    summary = Summary.read(run)
    assert (summary.accepted, summary.rejected, summary.lost) == (3, 0, 0)
    assert {line["client"] for line in arrivals(run)} <= {0, 2}, "client 1 has no node"
    assert len(lines(run, "evaluation")) == 3

    experiment = from_config(read_header(run)["config"])
    network = bound_network(experiment.task, 0)
    algorithm: Any = experiment.algorithm
    server: Server[Any] = Server(
        algorithm=algorithm.attached(Student(network, experiment.task.logits, experiment.task.num_unlabeled)),
        model=GlobalModel(0, network.layout.pack(network.module)),
        num_clients=3,
        concurrency=2,
        seed=0,
    )
    server.receive(Left(1))
    trainer = Trainer(experiment.task, experiment.local_training, bound_network(experiment.task, 0))
    drive(server, Replay(iter(lines(run, "arrival")), trainer), num_versions=3)
    assert model_digest(server.model.weights) == summary.model_sha256

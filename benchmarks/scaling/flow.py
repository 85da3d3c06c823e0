"""A busy server whose clients do not train, so that only the library's cost remains."""

import tracemalloc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedecho.algorithms import FedBuff, FedEcho
from fedecho.core.layout import Layout
from fedecho.core.loop import drive
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, GlobalModel, Weights
from fedecho.distill import Distiller, Student
from fedecho.executors.executor import SerialExecutor
from fedecho.simulation.runtimes import Runtimes
from fedecho.simulation.transport import VirtualTransport
from fedecho.storage.checkpoint import encode

INPUTS, CLASSES = 64, 10
PER_UNIT = INPUTS + CLASSES
"""Weights of a hidden unit: a network of d weights has d / 74 of them."""


@dataclass
class Flow:
    """One run, driven a few versions at a time."""

    server: Server[Any]
    transport: VirtualTransport

    @property
    def buffer_size(self) -> int:
        return int(self.server.algorithm.buffer_size)  # type: ignore[attr-defined]

    def work(self, num_versions: int) -> None:
        drive(self.server, self.transport, num_versions=self.server.model.version + num_versions)

    @property
    def tensor_bytes(self) -> int:
        """All tensors that a checkpoint of the server would hold: models still in use, and the algorithm's state."""
        tensors: dict[str, torch.Tensor] = {}
        encode(self.server.snapshot(), tensors)
        return sum(tensor.nbytes for tensor in tensors.values())


def flow(algorithm: Any, num_clients: int, concurrency: int, num_params: int) -> Flow:
    """Every client answers with the same small update at once; when, is drawn from the paper's large runtimes."""
    delta, nothing = torch.full((num_params,), 1e-6), torch.zeros(0)
    server = Server(
        algorithm=algorithm,
        model=GlobalModel(0, Weights(torch.full((num_params,), 0.01), nothing)),
        num_clients=num_clients,
        concurrency=concurrency,
        seed=0,
    )
    executor = SerialExecutor(lambda job: ClientUpdate(job.dispatch.client, job.dispatch.model.version, delta, nothing, 1, 1))
    runtimes = Runtimes().assign([1] * num_clients, 0)
    return Flow(server, VirtualTransport(executor=executor, runtimes=runtimes, num_clients=num_clients, seed=0))


def echo(
    num_clients: int, concurrency: int, num_params: int, buffer_size: int, num_unlabeled: int, steps: int | None = None
) -> Flow:
    """FedEcho over FedBuff; ``steps`` = Q (None: one pass over U in batches of 50, 0: no distillation)."""
    width = max(1, num_params // PER_UNIT)
    module = nn.Sequential(nn.Linear(INPUTS, width, bias=False), nn.ReLU(), nn.Linear(width, CLASSES, bias=False))
    network = Layout.of(module).bind(module)
    unlabeled = torch.randn(num_unlabeled, INPUTS, generator=torch.Generator().manual_seed(0))
    student = Student(network, lambda module, rows: module(unlabeled[rows]), num_unlabeled)
    inner, distiller = FedBuff(buffer_size=buffer_size), Distiller(num_distill_steps=steps)
    algorithm = FedEcho(inner=inner, distiller=distiller, seed=0, student=student)
    return flow(algorithm, num_clients, concurrency, network.layout.num_params)


def fill_bank(made: Flow) -> Flow:
    """Every client has been heard once."""
    bank = made.server.state.bank
    for client in range(made.server.num_clients):
        bank.put(client, torch.zeros_like(bank.total, dtype=torch.float32), 0)
    return made


def python_bytes(num_clients: int) -> int:
    """What a server, its transport and the clients' runtimes hold in Python's memory, tensors apart."""
    tracemalloc.start()
    try:
        made = flow(FedBuff(buffer_size=10), num_clients, min(64, num_clients), 10)
        made.work(1)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

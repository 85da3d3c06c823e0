"""Measure the gain of our weight layout on a CPU: LeNet-5's SGD steps plain, channels-last, and in one flat vector.

    python -m benchmarks.peers.flat_steps [--updates 60] [--turns 3]

The ways take turns; the fastest turn of each is shown. Freed memory is kept by all three.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.arguments import at_least_one
from benchmarks.peers.job import JOBS, Job, batch, examples, network, settle
from fedecho.core.layout import Layout
from fedecho.learning.trainer import keep_heap


class Plain:
    """A module and torch.optim."""

    def __init__(self, module: nn.Module, client_lr: float) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=client_lr)

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.module(images), labels).backward()
        self.optimizer.step()


class ChannelsLast(Plain):
    def __init__(self, module: nn.Module, client_lr: float) -> None:
        super().__init__(module.to(memory_format=torch.channels_last), client_lr)  # type: ignore[call-overload]


class Flat:
    """As our trainer binds it."""

    def __init__(self, module: nn.Module, client_lr: float) -> None:
        self.net, self.client_lr = Layout.of(module).bind(module), client_lr

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.net.grads.zero_()
        cross_entropy(self.net.module(images), labels).backward()
        self.net.weights.params.sub_(self.net.grads, alpha=self.client_lr)


WAYS = {"torch.optim": Plain, "torch.optim, channels-last kernels": ChannelsLast, "one flat vector, channels-last": Flat}


def ms_per_step(way: type[Plain] | type[Flat], job: Job, clients: list[tuple[Tensor, Tensor]], updates: int) -> float:
    trained = way(network(job.network).train(), job.client_lr)
    trained.step(*batch(job, clients[0], 0))
    began = time.perf_counter()
    for number in range(updates):
        for local in range(job.num_local_steps):
            trained.step(*batch(job, clients[number % job.num_clients], local))
    return (time.perf_counter() - began) / (updates * job.num_local_steps) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=at_least_one, default=60)
    parser.add_argument("--turns", type=at_least_one, default=3)
    options = parser.parse_args()
    job = JOBS["cnn"]
    settle(job)
    keep_heap()
    clients = [examples(job, client) for client in range(job.num_clients)]
    turns = [
        {name: ms_per_step(way, job, clients, options.updates) for name, way in WAYS.items()} for _ in range(options.turns)
    ]
    for name in WAYS:
        print(f"{name:<36} {min(turn[name] for turn in turns):.2f} ms a step")


if __name__ == "__main__":
    main()

"""The common job: one network, the same generated images on the same clients, the same number of SGD steps.

Needs torch and numpy alone (and our ResNet, one file of plain torch), so that it imports in every peer's environment.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch.optim imports it within its first step, for a second or two: everybody has it before the clock runs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

from benchmarks.peers.tally import step
from fedecho.tasks.vision.resnet import ResNet


@dataclass(frozen=True, kw_only=True)
class Job:
    """A federated job. ``workers`` and ``options`` say how the one who runs it does so."""

    network: str = "lenet"
    num_clients: int = 20
    num_examples: int = 320
    """Of each client."""
    batch_size: int = 32
    num_local_steps: int = 10
    num_updates: int = 200
    buffer_size: int = 10
    """As many as are at work at once: those who only know rounds then make the same number of server steps."""
    concurrency: int = 10
    client_lr: float = 0.01
    device: str = "cpu"
    workers: int = 1
    options: str = ""
    """Words that a runner understands, such as "bf16"."""

    @property
    def num_versions(self) -> int:
        return self.num_updates // self.buffer_size

    @property
    def shape(self) -> tuple[int, int, int]:
        return (1, 28, 28) if self.network == "lenet" else (3, 32, 32)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


TOLD = "PEERS_JOB"
JOBS = {
    "cnn": Job(),
    "resnet18": Job(network="resnet18", num_examples=64, batch_size=16, num_local_steps=4, num_updates=20),
    "overhead": Job(num_examples=2, batch_size=2, num_local_steps=1, num_updates=500),
    "gpu": Job(
        network="resnet18",
        num_clients=50,
        num_examples=1000,
        batch_size=50,
        num_local_steps=40,
        num_updates=50,
        buffer_size=5,
        device="cuda",
    ),
}


def told() -> Job:
    """The job of the command line: its name, or all of it as JSON."""
    text = sys.argv[1] if len(sys.argv) > 1 else "cnn"
    job = JOBS[text] if text in JOBS else Job(**json.loads(text))
    os.environ[TOLD] = job.to_json()
    return job


def inherited() -> Job:
    """The job of the runner that started this process."""
    return Job(**json.loads(os.environ[TOLD]))


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling, 61,706 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = max_pool2d(relu(self.conv1(x)), 2)
        y = max_pool2d(relu(self.conv2(y)), 2).flatten(1)
        logits: Tensor = self.fc3(relu(self.fc2(relu(self.fc1(y)))))
        return logits


class _Counted:
    """Beside a network: each of its training steps is counted, whoever makes it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
            step()
        logits: Tensor = super().forward(x)  # type: ignore[misc]
        return logits


class CountedLeNet(_Counted, LeNet):
    pass


class CountedResNet(_Counted, ResNet):
    """ResNet-18."""


def network(name: str = "lenet", seed: int = 0) -> nn.Module:
    """The same initial weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CountedLeNet() if name == "lenet" else CountedResNet()


def examples(job: Job, client: int) -> tuple[Tensor, Tensor]:
    """A client's images and labels. They are noise: what is learnt changes no time."""
    rng = np.random.default_rng([job.num_examples, client])
    images = rng.standard_normal((job.num_examples, *job.shape), dtype=np.float32)
    labels = rng.integers(0, 10, job.num_examples)
    return torch.from_numpy(images).to(job.device), torch.from_numpy(labels).to(job.device)


def batch(job: Job, data: tuple[Tensor, Tensor], number: int) -> tuple[Tensor, Tensor]:
    """The batch of a job's step ``number``: in turn, and from the front again."""
    per_pass = -(-job.num_examples // job.batch_size)
    first = number % per_pass * job.batch_size
    return data[0][first : first + job.batch_size], data[1][first : first + job.batch_size]


def train_locally(job: Job, module: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """A client's SGD steps, for those who leave them to their user."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=job.client_lr)
    for local in range(job.num_local_steps):
        images, labels = batch(job, data, local)
        loss = cross_entropy(module(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def settle(job: Job) -> None:
    """One thread for each process: everybody has the same."""
    torch.set_num_threads(1)
    if job.device != "cpu":
        torch.backends.cudnn.benchmark = True


def changed(job: Job, **changes: Any) -> Job:
    return replace(job, **changes)

"""Networks and tasks as users bring them, importable by worker processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

from fedecho import Experiment
from fedecho.core.algorithm import Algorithm
from fedecho.core.task import Task
from fedecho.learning.local import LocalTraining


class Net(nn.Module):
    """The network of Flower's PyTorch quickstart, word for word."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(relu(self.conv1(x)))
        x = self.pool(relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = relu(self.fc1(x))
        x = relu(self.fc2(x))
        return self.fc3(x)


class Odd(nn.Module):
    """All that a strict loading asks for: frozen weights, a counter, a mask, tied weights and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 5, stride=3)
        self.stem.weight.requires_grad_(False)
        self.norm = nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 10)
        self.register_buffer("mask", torch.tensor([True, True, False, True]))
        self.register_buffer("num_calls", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = max_pool2d(relu(self.norm(self.stem(x))), 10).flatten(1)
        return self.head(self.second(torch.tanh(self.first(x))) * self.mask)


@dataclass(frozen=True)
class OwnImages:
    """Random images of 32 x 32. ``network`` gives the one module that the task was made with, every time."""

    module: nn.Module = field(default_factory=Net)
    num_clients: int = 4
    num_unlabeled: int = 6

    def network(self, seed: int) -> nn.Module:
        return self.module

    def num_examples(self, client: int) -> int:
        return 6

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = _images(client)
        return images[rows], labels[rows]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(module(batch[0]), batch[1])

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        logits: Tensor = module(_images(98)[0][rows])
        return logits

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        images, labels = _images(99)
        return {"accuracy": float((module(images).argmax(dim=1) == labels).float().mean())}


def _images(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 3, 32, 32, generator=generator), torch.randint(0, 10, (6,), generator=generator)


def experiment_of(task: Task, algorithm: Algorithm[Any], **settings: Any) -> Experiment:
    local = LocalTraining(client_lr=0.05, num_local_steps=2, batch_size=4)
    known: dict[str, Any] = {"local": local, "concurrency": 3, "num_versions": 3}
    return Experiment(task=task, algorithm=algorithm, **(known | settings))

"""ResNet-18 and a handful of images, so that a round trip is nearly all communication."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho import Experiment, FedBuff, LocalTraining
from fedecho.tasks.vision.resnet import resnet18


class FewImages:
    num_clients, num_unlabeled = 1, 0

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.images = torch.randn(4, 3, 32, 32, generator=draw)
        self.labels = torch.randint(10, (4,), generator=draw)

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return resnet18(10)

    def num_examples(self, client: int) -> int:
        return len(self.labels)

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.images[rows], self.labels[rows]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(module(batch[0]), batch[1])

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"accuracy": 0.0}


def experiment(run_config: Mapping[str, Any]) -> Experiment:
    local = LocalTraining(client_lr=0.01, num_local_steps=1, batch_size=4)
    return Experiment(task=FewImages(), algorithm=FedBuff(buffer_size=1), local=local, concurrency=1, num_versions=1)

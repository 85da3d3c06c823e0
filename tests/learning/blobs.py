"""A classification task of random points that notes which rows it was asked for."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.layout import Layout
from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.learning import LocalTraining, Trainer

FEATURES, CLASSES = 6, 4


class Blobs:
    """Client c has 10 + c examples. With ``jitter``, batches are augmented from the generator they are given."""

    num_clients, num_unlabeled = 5, 0

    def __init__(self, jitter: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(9)
        self.inputs = [torch.randn(10 + c, FEATURES, generator=generator) for c in range(self.num_clients)]
        self.labels = [torch.randint(CLASSES, (10 + c,), generator=generator) for c in range(self.num_clients)]
        self.jitter = jitter
        self.rows: list[list[int]] = []
        self.batches: list[tuple[Tensor, Tensor]] = []

    def num_examples(self, client: int) -> int:
        return len(self.labels[client])

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        self.rows.append(rows.tolist())
        inputs = self.inputs[client][rows]
        inputs = inputs + self.jitter * torch.randn(inputs.shape, generator=generator)
        self.batches.append((inputs, self.labels[client][rows]))
        return self.batches[-1]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(module(batch[0]), batch[1])


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES, bias=False)
    )


def ordered(module: nn.Module) -> list[nn.Parameter]:
    """The parameters in the order in which they lie in a flat vector."""
    return [module.get_parameter(part.name) for part in Layout.of(module).params]


def trainer_of(module: nn.Module, local: LocalTraining, jitter: float = 0.0) -> Trainer:
    copy = deepcopy(module)
    return Trainer(Blobs(jitter), local, Layout.of(copy).bind(copy))


def dispatch_of(module: nn.Module, *, client: int = 1, seed: int = 5, correction: Tensor | None = None) -> Dispatch:
    return Dispatch(0, client, GlobalModel(2, Layout.of(module).pack(module), correction), seed)


def reference(
    module: nn.Module,
    task: Blobs,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    extra: Callable[[nn.Module], Tensor] = lambda module: torch.zeros(()),
) -> tuple[Weights, list[float]]:
    """An ordinary training loop over the batches that the task handed out: the weights and the losses."""
    plain, losses = deepcopy(module).train(), []
    optimizer = make(list(plain.parameters()))
    for inputs, labels in task.batches:
        optimizer.zero_grad()
        loss = cross_entropy(plain(inputs), labels)
        losses.append(float(loss.detach()))
        (loss + extra(plain)).backward()
        optimizer.step()
    return Layout.of(plain).pack(plain), losses

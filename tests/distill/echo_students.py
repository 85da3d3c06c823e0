"""Small students that note the rows and gradients of every step."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedecho.core.layout import Layout
from fedecho.core.types import Weights
from fedecho.distill import Distiller, Student
from fedecho.distill.distiller import Adam

ROWS, FEATURES, CLASSES = 22, 5, 3
U = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
TEACHER = 2 * torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2))


def network(dropout: float = 0.0) -> nn.Module:
    """No bias before BatchNorm: its gradient is rounding alone, of which Adam would make full steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, CLASSES)
        )


@dataclass
class Notes:
    rows: list[list[int]] = field(default_factory=list)
    training: list[bool] = field(default_factory=list)


def student_of(module: nn.Module, notes: Notes | None = None, chunk: int = 500) -> Student:
    copy = deepcopy(module)

    def logits(net: nn.Module, rows: Tensor) -> Tensor:
        if notes is not None:
            notes.rows.append(rows.tolist())
            notes.training.append(net.training)
        return net(U[rows])

    return Student(Layout.of(copy).bind(copy), logits, ROWS, chunk)


def start() -> Weights:
    module = network()
    return Layout.of(module).pack(module)


@dataclass(frozen=True, kw_only=True)
class Noting(Distiller):
    """A distiller that keeps the clipped gradient of every step."""

    gradients: list[Tensor] = field(default_factory=list, compare=False)

    def step(self, adam: Adam, params: Tensor, grad: Tensor) -> Adam:
        self.gradients.append(grad.clone())
        return super().step(adam, params, grad)


def distil(distiller: Distiller, student: Student, weights: Weights, adam: Adam | None = None, seed: int = 0) -> Any:
    return distiller.distill(student, adam or Adam.fresh(weights.params), weights, TEACHER, seed)

"""The network that the server runs: as a client's model to ask for logits, as the student to be taught."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedecho.core.layout import BoundNetwork
from fedecho.core.types import Weights
from fedecho.distill.bank import Bank

if TYPE_CHECKING:
    from fedecho.distill.distiller import Adam, Distiller


class Teacher(Protocol):
    """The mean teacher's logits at some rows of U: a tensor, or what can make them."""

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


def check_unlabeled(num_unlabeled: int) -> None:
    if num_unlabeled < 1:
        raise ValueError(
            f"FedEcho needs an unlabeled set, but this task's has {num_unlabeled} examples: raise task.unlabeled_size "
            "(sentence pairs) or task.num_unlabeled (any other task), or change the method"
        )


@dataclass(frozen=True)
class Student:
    """A bound network beside the task's ``logits(module, rows of U)``."""

    network: BoundNetwork
    logits: Callable[[nn.Module, Tensor], Tensor]
    num_unlabeled: int
    chunk: int = 500
    """How many rows are inferred at once."""

    def __post_init__(self) -> None:
        check_unlabeled(self.num_unlabeled)

    @property
    def device(self) -> torch.device:
        return self.network.weights.params.device

    def bank(self, distiller: "Distiller") -> Any:
        """An empty bank for what ``infer`` gives."""
        kinds = (distiller.average, distiller.teacher, distiller.trim, distiller.keeping, distiller.correction)
        return Bank(self.num_unlabeled, self.num_classes(), self.device, *kinds)

    def infer(self, weights: Weights) -> Any:
        """The logits of a model on the whole of U, in eval mode."""
        self.network.load(weights)
        module = self.network.module.eval()
        with torch.no_grad():
            rows = torch.arange(self.num_unlabeled, device=self.device)
            return torch.cat([self.logits(module, part) for part in rows.split(self.chunk)]).float()

    def teach(
        self, distiller: "Distiller", adam: "Adam", weights: Weights, teacher: Teacher, batches: list[Tensor]
    ) -> tuple["Adam", Weights, Tensor]:
        """Q steps on the given rows of U, from ``weights`` to new ones, with what was seen at each step."""
        network, seen = self.network, []
        network.load(weights)
        _prepare(network.module, distiller.batch_norm)
        network.grads.zero_()
        for rows in batches:
            seen.append(distiller.gradient_of(network, self.logits(network.module, rows), teacher[rows]))
            adam = distiller.step(adam, network.weights.params, network.grads)
            network.grads.zero_()
        return adam, network.weights.clone(), torch.stack(seen) if seen else torch.zeros(0, 5)

    def num_classes(self) -> int:
        """Asked of the model itself: one row tells."""
        with torch.no_grad():
            return int(self.logits(self.network.module.eval(), torch.zeros(1, dtype=torch.long, device=self.device)).shape[-1])


def _prepare(module: nn.Module, batch_norm: str) -> None:
    module.train()
    if batch_norm == "frozen":
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()

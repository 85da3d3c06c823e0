"""The network that the server runs: as a client's model to get logits, and as the student that is distilled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedecho.core.layout import BoundNetwork
from fedecho.core.task import Positions, TokenTask
from fedecho.core.types import Weights
from fedecho.distill.bank import Bank
from fedecho.distill.token_bank import Storage, TokenBank, storage_for

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


if TYPE_CHECKING:
    from fedecho.distill.distiller import Distiller

TOP_K = 64
CHUNK = 16
"""Texts inferred at once: with a vocabulary of 150,000 and 256 tokens each, 2.5 GB of logits where logits are needed."""


@dataclass(frozen=True)
class TokenStudent(Student):
    """``teach`` is that of any student: ``logits`` and ``teacher[rows]`` have a row for each position instead of each example."""

    task: TokenTask | None = None
    settings: "Distiller | None" = None

    @cached_property
    def storage(self) -> Storage:
        settings, head = self._settings, self._task.head(self.network.module)
        return storage_for(
            head, self.num_classes(), settings.token_bank, settings.top_k or TOP_K, bool(settings.half_bank), settings.average
        )

    def bank(self, distiller: "Distiller") -> TokenBank:
        if distiller.teacher != "mean":
            raise ValueError(f"distiller.teacher must be 'mean' for a language model's bank, got {distiller.teacher!r}")
        if distiller.prior_correction:
            raise ValueError(
                "distiller.prior_correction is for classifiers: what a client's mean prediction tells of a whole vocabulary is how "
                "often tokens occur, not what the client has seen; leave it out (fedecho in place of fedecho+)"
            )
        if distiller.bank_memory is not None or distiller.bank_budget_mb is not None:
            raise ValueError(
                "distiller.bank_memory and distiller.bank_budget_mb are for the bank of a classifier: "
                "a language model's is bounded by token_bank, top_k and half_bank"
            )
        return TokenBank(self.storage, Positions(self._task.position_counts()), self.device)

    def infer(self, weights: Weights) -> Any:
        """The entry of a model for the whole of U, in eval mode."""
        self.network.load(weights)
        module = self.network.module.eval()
        head = self._task.head(module)
        with torch.no_grad():
            parts = [
                self.storage.entry(self._task.hidden(module, rows), head)
                for rows in torch.arange(self.num_unlabeled, device=self.device).split(self.chunk)
            ]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    @property
    def _task(self) -> TokenTask:
        if self.task is None:
            raise ValueError("a token student needs its task")
        return self.task

    @property
    def _settings(self) -> "Distiller":
        if self.settings is None:
            raise ValueError("a token student needs the distiller's settings")
        return self.settings


def student_for(network: BoundNetwork, task: Any, distiller: "Distiller | None", chunk: int = 500) -> Student:
    """The student of a task: one that knows tokens where the task has them."""
    if isinstance(task, TokenTask) and distiller is not None:
        chunk = min(chunk, CHUNK, distiller.batch_size)  # who lowers the batch for want of memory means inference too
        return TokenStudent(network, task.logits, task.num_unlabeled, chunk, task, distiller)  # type: ignore[attr-defined]
    if distiller is not None and (distiller.token_bank, distiller.top_k) != (None, None):
        raise ValueError(
            f"distiller.token_bank and top_k are for language models, and {type(task).__name__} has no tokens to keep"
        )
    logits: Any = task.logits
    return Student(network, logits, task.num_unlabeled, chunk)

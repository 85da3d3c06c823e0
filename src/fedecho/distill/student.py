"""The server's network, which computes the logits of clients' models and is the student in distillation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from fedecho.core.algorithm import Algorithm
from fedecho.core.layout import BoundNetwork
from fedecho.core.randomness import torch_rng
from fedecho.core.task import Positions, TokenTask, defines
from fedecho.core.types import Weights
from fedecho.distill.bank import Bank
from fedecho.distill.token_bank import TokenBank, TokenStorage, storage_for

if TYPE_CHECKING:
    from fedecho.distill.distiller import Adam, Distiller


class Teacher(Protocol):
    """The teacher's logits, indexed by rows of U: a tensor, or an object that computes them."""

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


def check_unlabeled(num_unlabeled: int) -> None:
    if num_unlabeled < 1:
        raise ValueError(
            f"FedEcho needs an unlabeled set, but this task's has {num_unlabeled} examples: raise task.unlabeled_size "
            "(sentence pairs) or task.num_unlabeled (other tasks), or choose another method"
        )


SAMPLE, SAMPLE_TEXTS = (64, 256), 4
"""How many rows of U diagnostics use: an eighth within these limits, or four texts, each of which has many positions."""


def _sampled(num_unlabeled: int, most: int) -> Tensor:
    """Return at most this many rows of U, in order; the same ones in every run."""
    return torch.randperm(num_unlabeled, generator=torch_rng(0, "sample of U"))[:most].sort().values


@dataclass(frozen=True)
class Student:
    """A bound network with the task's ``logits(module, rows of U)``."""

    network: BoundNetwork
    logits: Callable[[nn.Module, Tensor], Tensor]
    num_unlabeled: int
    chunk: int = 500
    """How many rows of U one forward pass covers."""

    def __post_init__(self) -> None:
        check_unlabeled(self.num_unlabeled)

    @property
    def device(self) -> torch.device:
        return self.network.weights.params.device

    def bank(self, distiller: "Distiller") -> Bank | TokenBank:
        """Return an empty bank for the results of ``infer``."""
        settings = (distiller.average, distiller.teacher, distiller.trim, distiller.keeping, distiller.correction)
        return Bank(self.num_unlabeled, self.num_classes(), self.device, *settings)

    def infer(self, weights: Weights) -> Any:
        """Return the logits of a model on all of U, in eval mode."""
        self.network.load(weights)
        module = self.network.module.eval()
        with torch.no_grad():
            rows = torch.arange(self.num_unlabeled, device=self.device)
            return torch.cat([self.logits(module, part) for part in rows.split(self.chunk)]).float()

    @cached_property
    def sample(self) -> tuple[Tensor, ...]:
        """The fixed rows of U on which diagnostics compare models, in parts that fit into memory."""
        least, most = SAMPLE
        return (_sampled(self.num_unlabeled, min(most, max(least, self.num_unlabeled // 8))).to(self.device),)

    def predict(self, weights: Weights, rows: Tensor) -> Tensor:
        """Return the logits of a model on some rows of U, in eval mode."""
        self.network.load(weights)
        with torch.no_grad():
            return self.logits(self.network.module.eval(), rows).float()

    def teach(
        self, distiller: "Distiller", adam: "Adam", weights: Weights, teacher: Teacher, batches: list[Tensor]
    ) -> tuple["Adam", Weights, Tensor]:
        """Train on the given batches of rows of U, starting from ``weights``. Return the new weights and each step's metrics."""
        network, metrics = self.network, []
        network.load(weights)
        _prepare(network.module, distiller.batch_norm)
        network.grads.zero_()
        for rows in batches:
            metrics.append(distiller.gradient_of(network, self.logits(network.module, rows), teacher[rows]))
            adam = distiller.step(adam, network.weights.params, network.grads)
            network.grads.zero_()
        return adam, network.weights.clone(), torch.stack(metrics) if metrics else torch.zeros(0, 5)

    def num_classes(self) -> int:
        """Return the model's number of classes, found by running it on one row."""
        with torch.no_grad():
            return int(self.logits(self.network.module.eval(), torch.zeros(1, dtype=torch.long, device=self.device)).shape[-1])


def _prepare(module: nn.Module, batch_norm: str) -> None:
    module.train()
    if batch_norm == "frozen":
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()


class Distils(Protocol):
    """An algorithm that distils into a student."""

    @property
    def distiller(self) -> "Distiller": ...

    def attached(self, student: Student) -> Algorithm[Any]:
        """Return this algorithm with the student it distils into."""
        ...


def distils(algorithm: object) -> TypeGuard[Distils]:
    """Report whether the algorithm has a method ``attached``. A field that has this name by chance does not count."""
    return defines(algorithm, "attached")


TOP_K = 64
CHUNK = 16
"""Texts per forward pass: with a vocabulary of 150,000 and 256 tokens each, full logits take 2.5 GB."""


@dataclass(frozen=True)
class TokenStudent(Student):
    """The student of a language model: ``logits`` and ``teacher[rows]`` have a row per position instead of per example."""

    task: TokenTask | None = None
    settings: "Distiller | None" = None

    @cached_property
    def storage(self) -> TokenStorage:
        settings, head = self._settings, self._task.head(self.network.module)
        return storage_for(
            head, self.num_classes(), settings.token_bank, settings.top_k or TOP_K, bool(settings.half_bank), settings.average
        )

    @cached_property
    def sample(self) -> tuple[Tensor, ...]:
        return tuple(_sampled(self.num_unlabeled, SAMPLE_TEXTS).to(self.device).split(1))

    def bank(self, distiller: "Distiller") -> TokenBank:
        if distiller.teacher != "mean":
            raise ValueError(f"distiller.teacher must be 'mean' for a language model, got {distiller.teacher!r}")
        if distiller.prior_correction:
            raise ValueError(
                "distiller.prior_correction is for classifiers: over a vocabulary, a client's mean prediction reflects how common "
                "tokens are, not the client's data. Leave it out (use fedecho instead of fedecho+)"
            )
        if distiller.bank_memory is not None or distiller.bank_budget_mb is not None:
            raise ValueError(
                "distiller.bank_memory and distiller.bank_budget_mb are for classifiers: "
                "limit a language model's bank by token_bank, top_k and half_bank"
            )
        return TokenBank(self.storage, Positions(self._task.position_counts()), self.device)

    def infer(self, weights: Weights) -> Any:
        """Return the bank entry of a model for all of U, computed in eval mode."""
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
    """Return the student of a task: a ``TokenStudent`` for a task with tokens, otherwise a ``Student``."""
    if isinstance(task, TokenTask) and distiller is not None:
        chunk = min(chunk, CHUNK, distiller.batch_size)  # a batch lowered to save memory limits inference too
        return TokenStudent(network, task.logits, task.num_unlabeled, chunk, task, distiller)  # type: ignore[attr-defined]
    if distiller is not None and (distiller.token_bank, distiller.top_k) != (None, None):
        raise ValueError(
            f"distiller.token_bank and top_k are for language models, but {type(task).__name__} has no tokens: leave them out"
        )
    logits: Any = task.logits
    return Student(network, logits, task.num_unlabeled, chunk)

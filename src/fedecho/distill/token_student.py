"""The student of a language task: it answers with what its bank keeps, a few texts at a time."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fedecho.core.layout import BoundNetwork
from fedecho.core.tokens import Positions, TokenTask
from fedecho.core.types import Weights
from fedecho.distill.storage import Storage, storage_for
from fedecho.distill.student import Student
from fedecho.distill.token_bank import TokenBank

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

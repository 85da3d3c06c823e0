"""The ``Task`` protocol, which provides data and a model, and the optional protocols of a task."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

Batch = Any
"""What ``Task.batch`` returns and ``Task.loss`` accepts: a pair of tensors, a dict, ..."""


def defines(value: object, *methods: str) -> bool:
    """Report whether the class of ``value`` has these methods. A field that has such a name by chance does not count.

    >>> defines("text", "join"), defines("text", "evaluate")
    (True, False)
    """
    return all(callable(getattr(type(value), name, None)) for name in methods)


class Task(Protocol):
    """A model, the clients' examples, an unlabeled set U on the server and an evaluation.

    Rows are indices: into one client's examples in ``batch``, into U in ``logits``. The data itself may have any form.
    """

    @property
    def num_clients(self) -> int: ...

    @property
    def num_unlabeled(self) -> int:
        """|U|, or 0 for a task without an unlabeled set, on which FedEcho cannot run."""
        ...

    def network(self, seed: int) -> nn.Module:
        """Return the initial model; equal for equal seeds. A run trains copies in its memory format (channels-last is faster)."""
        ...

    def num_examples(self, client: int) -> int: ...

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Batch:
        """Return one mini-batch of a client. Augmentation must draw from ``generator`` only."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""
        ...

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        """Return the logits on rows of U, [rows, classes]. Gradients are on for the student, off for a client's model."""
        ...

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """Return scores on held-out data, including ``accuracy`` (0 to 1). The module is in eval mode, gradients are off.

        The report shows ``accuracy_class_0``, ``accuracy_class_1``, ... by class. It also shows the clients' labels if the task
        has a method ``label_counts(client) -> {class: number of examples}``.
        """
        ...


@runtime_checkable
class HasInputs(Protocol):
    """A task that reads files and can check all of them before the first client trains."""

    def read_inputs(self, unlabeled: bool) -> Mapping[str, str]:
        """Read and check all inputs of a run, with U if ``unlabeled``. Return each part's digest, optionally with a comment.

        The record stores them. A resumed run must find the same digests (the first word of each).
        """
        ...


@runtime_checkable
class Saves(Protocol):
    """A task whose models can be saved in a format that other programs load."""

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write a model of the kind ``network`` returns into an empty folder, with everything needed to use it."""
        ...


@runtime_checkable
class HasClasses(Protocol):
    """A task that says how many classes its examples have."""

    @property
    def num_classes(self) -> int: ...


class OnDevice(Protocol):
    """A task that can be moved to another device."""

    def on(self, device: str) -> Task:
        """Return this task with its data on ``device``."""
        ...


def can_move(task: Task) -> TypeGuard[OnDevice]:
    """Report whether the task has a method ``on``."""
    return defines(task, "on")


class CountsLabels(Protocol):
    """A task that can count each client's labels."""

    def label_counts(self, client: int) -> Mapping[int, int]:
        """Return the client's number of examples by class."""
        ...


def counts_labels(task: Task) -> TypeGuard[CountsLabels]:
    """Report whether the task has a method ``label_counts``."""
    return defines(task, "label_counts")


@runtime_checkable
class Seeded(Protocol):
    """A part of an experiment with a seed. None stands for the experiment's seed."""

    @property
    def seed(self) -> int | None: ...


def scores_of(task: Task, module: nn.Module) -> dict[str, float]:
    """Evaluate the module in eval mode and without gradients."""
    with torch.no_grad():
        return {name: _plain(name, value) for name, value in task.evaluate(module.eval()).items()}


def _plain(name: str, value: Any) -> Any:
    """A number of NumPy's or a tensor of one is its Python number, which a record can hold."""
    if isinstance(value, Tensor | np.ndarray) and len(value.reshape(-1)) != 1:
        raise TypeError(f"evaluate: {name!r} must be a number, got {type(value).__name__} of shape {tuple(value.shape)}")
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value


ProgressCallback = Callable[[int, int], None]
"""Receives how many parts of the total are done. It may raise ``Stopped``."""
_CALLBACK: ContextVar[ProgressCallback | None] = ContextVar("progress callback", default=None)


class Stopped(Exception):  # noqa: N818 (no error)
    """An evaluation was stopped on request and is incomplete."""


def report_progress(done: int, total: int) -> None:
    """Report the progress of a long evaluation to the callback of ``progress_callback``, if there is one."""
    callback = _CALLBACK.get()
    if callback is not None:
        callback(done, total)


@contextmanager
def progress_callback(callback: ProgressCallback) -> Iterator[None]:
    """Pass the progress that ``report_progress`` reports inside this context to ``callback``."""
    token = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(token)


@runtime_checkable
class TokenTask(Protocol):
    """A task whose rows of U are texts: each row has several positions, with a prediction over the vocabulary at each.

    ``logits(module, rows)`` of such a task is [positions of the rows, vocabulary] and equals ``head(module)`` of ``hidden``.
    """

    def position_counts(self) -> Tensor:
        """Return the number of positions of each row of U, without padding, on the CPU."""
        ...

    def hidden(self, module: nn.Module, rows: Tensor) -> Tensor:
        """Return the inputs of the output layer, [positions of the rows, width], row after row without padding."""
        ...

    def head(self, module: nn.Module) -> nn.Module:
        """Return the output layer, from the width to the vocabulary."""
        ...


def is_exact(head: nn.Module) -> bool:
    """Report whether the mean of the logits equals the head of the mean hidden state: one frozen matrix without a bias."""
    return isinstance(head, nn.Linear) and head.bias is None and not any(param.requires_grad for param in head.parameters())


class Positions:
    """The positions of each row when all rows are concatenated."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts.to("cpu", torch.long)
        self.starts = self.counts.cumsum(0) - self.counts

    @property
    def num(self) -> int:
        return int(self.counts.sum())

    def of(self, rows: Tensor) -> Tensor:
        """Return the positions of these rows, in the order of the rows, on the CPU."""
        rows = rows.cpu()
        counts = self.counts[rows]
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return self.starts[rows].repeat_interleave(counts) + within

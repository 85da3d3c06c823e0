"""``Task``: the one protocol a user implements to bring data and a model, and what a task may offer beyond it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Batch = Any
"""Whatever ``Task.batch`` returns and ``Task.loss`` understands: a pair of tensors, a dict, ..."""


def defines(value: object, *methods: str) -> bool:
    """Are these methods of its class? A field that has such a name by chance is the user's own business.

    >>> defines("text", "join"), defines("text", "evaluate")
    (True, False)
    """
    return all(callable(getattr(type(value), name, None)) for name in methods)


class Task(Protocol):
    """A model, the clients' examples, an unlabeled set U on the server and an evaluation.

    Rows are indices: into one client's examples in ``batch``, into U in ``logits``. Nothing else is assumed of the data.
    """

    @property
    def num_clients(self) -> int: ...

    @property
    def num_unlabeled(self) -> int:
        """|U|; 0 for a task without one (then FedEcho cannot run on it)."""
        ...

    def network(self, seed: int) -> nn.Module:
        """The initial model; equal for equal seeds. A run trains copies, in its memory format (channels-last is faster)."""
        ...

    def num_examples(self, client: int) -> int: ...

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Batch:
        """One mini-batch of a client; augmentation draws from ``generator`` alone."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch."""
        ...

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        """The model's logits on rows of U, [rows, classes]: without gradients of a client's model, with them of the student."""
        ...

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """Scores on held-out data; ``accuracy`` (0 to 1) among them. The module is in eval mode, and gradients are off.

        ``accuracy_class_0``, ``accuracy_class_1``, ... are shown by class in the report, and so is what an optional
        method ``label_counts(client) -> {class: number of examples}`` says of who holds which.
        """
        ...


@runtime_checkable
class HasInputs(Protocol):
    """A task that reads files, where a mistake in any of them should be found before the first client trains."""

    def read_inputs(self, unlabeled: bool) -> Mapping[str, str]:
        """Reads and checks all that a run needs, U too if ``unlabeled``: a digest of each part by its name, and what else to say.

        They stand in the run's record, and a run that goes on must find the digests (the first words) again.
        """
        ...


@runtime_checkable
class Saves(Protocol):
    """A task whose models other programs know how to load."""

    def save(self, module: nn.Module, folder: Path) -> None:
        """Writes a model of ``network``'s kind into an empty folder, with all that is needed to use it."""
        ...


def scores_of(task: Task, module: nn.Module) -> dict[str, float]:
    """What ``task.evaluate`` says of the module in eval mode, computed without gradients."""
    with torch.no_grad():
        return dict(task.evaluate(module.eval()))


Told = Callable[[int, int], None]
"""Told how much is done of how much; it may raise ``Stopped``."""
_TOLD: ContextVar[Told | None] = ContextVar("told", default=None)


class Stopped(Exception):  # noqa: N818 (no error)
    """Somebody asked for a stop; what was begun is left undone."""


def at(done: int, total: int) -> None:
    """For an evaluation of many parts to call between them. Where nobody watches, nothing happens."""
    told = _TOLD.get()
    if told is not None:
        told(done, total)


@contextmanager
def watched(told: Told) -> Iterator[None]:
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


@runtime_checkable
class TokenTask(Protocol):
    """A task whose rows of U are texts: a row has several positions, and a prediction over the vocabulary at each.

    ``logits(module, rows)`` of such a task is [positions of the rows, vocabulary], and is ``head(module)`` of ``hidden``.
    """

    def position_counts(self) -> Tensor:
        """How many positions each row of U has, padding not counted; on the CPU."""
        ...

    def hidden(self, module: nn.Module, rows: Tensor) -> Tensor:
        """What the output layer sees, [positions of the rows, width]: row after row, padding left out."""
        ...

    def head(self, module: nn.Module) -> nn.Module:
        """The output layer, from the width to the vocabulary."""
        ...


def is_exact(head: nn.Module) -> bool:
    """Is the mean of logits the head of the mean hidden state? Yes if every client has the same matrix and no bias."""
    return isinstance(head, nn.Linear) and head.bias is None and not any(param.requires_grad for param in head.parameters())


class Positions:
    """Where the positions of each row lie when all rows are laid end to end."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts.to("cpu", torch.long)
        self.starts = self.counts.cumsum(0) - self.counts

    @property
    def num(self) -> int:
        return int(self.counts.sum())

    def of(self, rows: Tensor) -> Tensor:
        """The positions of these rows, in the order of the rows; on the CPU."""
        rows = rows.cpu()
        counts = self.counts[rows]
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return self.starts[rows].repeat_interleave(counts) + within

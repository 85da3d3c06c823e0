"""What a task must offer so that FedEcho can keep the predictions of a language model, which has one for every token."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


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

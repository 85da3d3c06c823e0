"""Token sequences of which a span is predicted: the answer behind a question, or every token of a text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.data.ragged import Ragged


@dataclass(frozen=True)
class SpanBatch:
    """Right-padded tokens, and the places (row, column) whose predictions count, row after row."""

    ids: Tensor
    mask: Tensor
    row: Tensor
    column: Tensor

    @property
    def targets(self) -> Tensor:
        """The tokens that follow those places."""
        return self.ids[self.row, self.column + 1]


@dataclass(frozen=True)
class Spans:
    """Rows of tokens; in row r the places from ``first[r]`` up to but not with ``end[r]`` count. Place p predicts token p + 1."""

    tokens: Ragged
    first: Tensor
    end: Tensor
    fill: int

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], first: Sequence[int], end: Sequence[int], fill: int, device: str) -> "Spans":
        return cls(Ragged.of(rows, device), torch.tensor(first), torch.tensor(end), fill)

    @property
    def counts(self) -> Tensor:
        return self.end - self.first

    def batch(self, rows: Tensor) -> SpanBatch:
        rows = rows.cpu()
        ids, mask = self.tokens.padded(rows, self.fill)
        counts = self.counts[rows]
        row = torch.arange(len(rows)).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts).repeat_interleave(counts)
        column = torch.arange(len(row)) - before + self.first[rows].repeat_interleave(counts)
        device = ids.device
        return SpanBatch(ids, mask, row.to(device, non_blocking=True), column.to(device, non_blocking=True))

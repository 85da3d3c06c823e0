"""Token sequences of which a span is predicted: the answer behind a question, or every token of a text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.core.lanes import sent
from fedecho.data.ragged import Ragged, To

IGNORED = -100
"""The target that torch's cross entropy leaves out."""


@dataclass(frozen=True)
class SpanBatch:
    """Right-padded tokens, and the places (row, column) whose predictions count, row after row."""

    ids: Tensor
    mask: Tensor
    row: Tensor
    column: Tensor
    filling: Tensor | None = None
    """True at places that stand there only to fill up."""

    @property
    def targets(self) -> Tensor:
        """The tokens that follow those places; ``IGNORED``, which a cross entropy leaves out, where there is only filling."""
        following = self.ids[self.row, self.column + 1]
        return following if self.filling is None else following.masked_fill(self.filling, IGNORED)


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

    def batch(self, rows: Tensor, tokens_to: To | None = None, places_to: To | None = None) -> SpanBatch:
        """Some rows; where batches must have few shapes, with as many tokens and places as the rounding says."""
        rows = rows.cpu()
        ids, mask = self.tokens.padded(rows, self.fill, to=tokens_to)
        counts = self.counts[rows]
        row = torch.arange(len(rows)).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts).repeat_interleave(counts)
        column = torch.arange(len(row)) - before + self.first[rows].repeat_interleave(counts)
        if places_to is None:
            return SpanBatch(ids, mask, sent(row, ids.device), sent(column, ids.device))
        places = torch.zeros(3, places_to.up(len(row)), dtype=torch.long)
        places[:2, : len(row)] = torch.stack([row, column])
        places[2, len(row) :] = 1
        there = sent(places, ids.device)
        return SpanBatch(ids, mask, there[0], there[1], there[2].bool())

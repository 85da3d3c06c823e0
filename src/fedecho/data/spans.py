"""Token sequences of which a span is predicted: the answer behind a question, or every token of a text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.core.lanes import sent
from fedecho.data.packing import Packing
from fedecho.data.ragged import Ragged, To

IGNORED = -100
"""The target that torch's cross entropy leaves out."""


@dataclass(frozen=True)
class SpanBatch:
    """Tokens padded on the right, and the places (row, column) whose predictions count, text after text."""

    ids: Tensor
    mask: Tensor
    row: Tensor
    column: Tensor
    filling: Tensor | None = None
    """True at places that stand there only to fill up."""
    text: Tensor | None = None
    """Where a row holds several texts: which of them a token is of, from 1 on; 0 is padding."""
    position: Tensor | None = None
    """And which token of its text it is."""

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
        row, column = self._places(rows)
        if places_to is None:
            return SpanBatch(ids, mask, sent(row, ids.device), sent(column, ids.device))
        there = sent(_filled_up(row, column, places_to), ids.device)
        return SpanBatch(ids, mask, there[0], there[1], there[2].bool())

    def in_few_shapes(self, rows: Tensor, tokens_to: To, width_to: To, rows_to: To, places_to: To) -> SpanBatch:
        """Some rows, several of them in each row of the batch where that is less to compute, each in a row of its own elsewhere."""
        lengths = self.tokens.lengths[rows.cpu()]
        packing = Packing.of(lengths, width_to, rows_to)
        if packing.num_tokens < len(lengths) * tokens_to.up(int(lengths.max())):
            return self.packed(rows, packing, places_to)
        return self.batch(rows, tokens_to, places_to)

    def packed(self, rows: Tensor, packing: Packing, places_to: To) -> SpanBatch:
        """Some rows, laid out as the packing says."""
        rows = rows.cpu()
        lengths, device = self.tokens.lengths[rows], self.tokens.flat.device
        within = _counted(lengths)
        to = (packing.row * packing.width + packing.column).repeat_interleave(lengths) + within
        cells = torch.zeros(3, packing.num_tokens, dtype=torch.long)
        number = torch.arange(1, len(rows) + 1).repeat_interleave(lengths)
        cells[:, to] = torch.stack([self.tokens.starts[rows].repeat_interleave(lengths) + within, number, within])
        source, which, position = sent(cells.view(3, packing.num_rows, packing.width), device)
        text, column = self._places(rows)
        there = sent(_filled_up(packing.row[text], packing.column[text] + column, places_to), device)
        mask = (which > 0).long()
        ids = torch.where(which > 0, self.tokens.flat[source].long(), self.fill)
        return SpanBatch(ids, mask, there[0], there[1], there[2].bool(), which, position)

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(which of ``rows``, which of its tokens) of all places that count."""
        counts = self.counts[rows]
        row = torch.arange(len(rows)).repeat_interleave(counts)
        return row, _counted(counts) + self.first[rows].repeat_interleave(counts)


def _counted(counts: Tensor) -> Tensor:
    """0, 1, ... for each count, one behind the other."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def _filled_up(row: Tensor, column: Tensor, to: To) -> Tensor:
    """[row, column, is filling] of as many places as the rounding says."""
    places = torch.zeros(3, to.up(len(row)), dtype=torch.long)
    places[:2, : len(row)] = torch.stack([row, column])
    places[2, len(row) :] = 1
    return places

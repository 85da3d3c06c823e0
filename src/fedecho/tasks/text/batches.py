"""Token sequences of different lengths as batches: ragged storage, packing several texts into a row, answer spans."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.gpu.streams import sent


@dataclass(frozen=True)
class To:
    """Sizes rounded up, so that batches have few shapes: to a multiple, but not above ``most``.

    ``spare`` is the least padding, where there is room: models that look whether there is any then do the same in every batch.
    """

    multiple: int
    most: int | None = None
    spare: int = 0

    def up(self, size: int) -> int:
        """
        >>> To(16).up(33), To(16, most=40).up(33), To(16).up(0), To(16).up(32), To(16, spare=1).up(32)
        (48, 40, 16, 32, 48)
        """
        wanted = max(-(-(size + self.spare) // self.multiple), 1) * self.multiple
        return wanted if self.most is None else max(min(wanted, self.most), size)


@dataclass(frozen=True)
class Ragged:
    """``lengths`` and ``starts`` are on the CPU: the width of a batch is then known without waiting for the device."""

    flat: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: str | torch.device = "cpu") -> "Ragged":
        lengths = torch.tensor([len(row) for row in rows])
        flat = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        return cls(flat.to(device), lengths, lengths.cumsum(0) - lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Tensor, fill: int, *, left: bool = False, to: "To | None" = None) -> tuple[Tensor, Tensor]:
        """(values, mask), both [rows, longest of them or ``to``], as int64 on the device; the mask is 1 on what is no padding."""
        rows = rows.cpu()
        lengths, starts = self.lengths[rows], self.starts[rows]
        width = int(lengths.max()) if to is None else to.up(int(lengths.max()))
        column = torch.arange(width)
        within = column - (width - lengths)[:, None] if left else column.expand(len(rows), -1)
        mask = (within >= 0) & (within < lengths[:, None])
        at = torch.where(mask, starts[:, None] + within, 0)
        device = self.flat.device
        mask, at = sent(mask, device), sent(at, device)
        return torch.where(mask, self.flat[at].long(), fill), mask.long()


@dataclass(frozen=True)
class Packing:
    """Where each text begins in rows of one width."""

    row: Tensor
    column: Tensor
    num_rows: int
    width: int

    @classmethod
    def of(cls, lengths: Tensor, width_to: To, rows_to: To) -> "Packing":
        """What fits into one row is one row; else so many as the rounding says."""
        width = width_to.up(int(lengths.max()))
        row, column = torch.tensor(first_fit(lengths.tolist(), width)).unbind(1)
        needed = int(row.max()) + 1
        return cls(row, column, rows_to.up(needed) if needed > 1 else 1, width)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


def first_fit(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """(row, column) of each text's beginning: the longest first, each into the first row that has room for it.

    >>> first_fit([3, 5, 2], width=5)
    [(1, 0), (0, 0), (1, 3)]
    """
    taken: list[int] = []
    places = [(0, 0)] * len(lengths)
    for text in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        row = next((row for row, used in enumerate(taken) if used + lengths[text] <= width), len(taken))
        if row == len(taken):
            taken.append(0)
        places[text] = (row, taken[row])
        taken[row] += lengths[text]
    return places


def own_text_only(text: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 1, width, width], to be added to attention's scores: a token sees those before it of its own text, and itself.

    ``text`` says of which text of its row each token is.
    """
    width = text.shape[1]
    seen = (text[:, :, None] == text[:, None, :]) & torch.ones(width, width, dtype=torch.bool, device=text.device).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=text.device).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


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

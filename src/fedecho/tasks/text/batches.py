"""Token sequences of different lengths as batches: ragged storage, packing several texts into a row, answer spans."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.gpu.streams import to_device


@dataclass(frozen=True)
class RoundUp:
    """Rounds sizes up to a multiple, but not above ``most``, so that batches have few shapes.

    ``spare`` is the least padding if ``most`` allows it: models that check for padding then take the same path in every batch.
    """

    multiple: int
    most: int | None = None
    spare: int = 0

    def apply(self, size: int) -> int:
        """Round ``size`` up.

        >>> RoundUp(16).apply(33), RoundUp(16, most=40).apply(33), RoundUp(16).apply(0)
        (48, 40, 16)
        >>> RoundUp(16).apply(32), RoundUp(16, spare=1).apply(32)
        (32, 48)
        """
        wanted = max(-(-(size + self.spare) // self.multiple), 1) * self.multiple
        return wanted if self.most is None else max(min(wanted, self.most), size)


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat tensor.

    ``lengths`` and ``starts`` are on the CPU, so that the width of a batch is known without waiting for the device.
    """

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

    def padded(self, rows: Tensor, fill: int, *, left: bool = False, to: RoundUp | None = None) -> tuple[Tensor, Tensor]:
        """Return (values, mask), int64 [rows, width] on the device; the mask is 0 on padding. ``to`` rounds up the width."""
        rows = rows.cpu()
        lengths, starts = self.lengths[rows], self.starts[rows]
        width = int(lengths.max()) if to is None else to.apply(int(lengths.max()))
        column = torch.arange(width)
        within = column - (width - lengths)[:, None] if left else column.expand(len(rows), -1)
        mask = (within >= 0) & (within < lengths[:, None])
        index = torch.where(mask, starts[:, None] + within, 0)
        device = self.flat.device
        mask, index = to_device(mask, device), to_device(index, device)
        return torch.where(mask, self.flat[index].long(), fill), mask.long()


@dataclass(frozen=True)
class Packing:
    """Where each text starts when several texts share rows of one width."""

    row: Tensor
    column: Tensor
    num_rows: int
    width: int

    @classmethod
    def of(cls, lengths: Tensor, width_to: RoundUp, rows_to: RoundUp) -> "Packing":
        """Pack texts of these lengths. One row stays one row; more rows are rounded up."""
        width = width_to.apply(int(lengths.max()))
        row, column = torch.tensor(first_fit(lengths.tolist(), width)).unbind(1)
        needed = int(row.max()) + 1
        return cls(row, column, rows_to.apply(needed) if needed > 1 else 1, width)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


def first_fit(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return the start (row, column) of each text; the longest come first, each in the first row with enough space.

    >>> first_fit([3, 5, 2], width=5)
    [(1, 0), (0, 0), (1, 3)]
    """
    row_lengths: list[int] = []
    starts = [(0, 0)] * len(lengths)
    for text in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        row = next((row for row, used in enumerate(row_lengths) if used + lengths[text] <= width), len(row_lengths))
        if row == len(row_lengths):
            row_lengths.append(0)
        starts[text] = (row, row_lengths[row])
        row_lengths[row] += lengths[text]
    return starts


def own_text_only(text: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive causal attention mask [rows, 1, width, width] that keeps the texts of a row apart.

    ``text`` gives, for each token, the number of its text within the row.
    """
    width = text.shape[1]
    visible = (text[:, :, None] == text[:, None, :]) & torch.ones(width, width, dtype=torch.bool, device=text.device).tril()
    return torch.zeros(visible.shape, dtype=dtype, device=text.device).masked_fill(~visible, torch.finfo(dtype).min)[:, None]


IGNORED = -100
"""The target that torch's cross entropy ignores."""


@dataclass(frozen=True)
class SpanBatch:
    """Right-padded tokens, and the positions (row, column) whose predictions count, text by text."""

    ids: Tensor
    mask: Tensor
    row: Tensor
    column: Tensor
    filler: Tensor | None = None
    """True at positions that are only padding."""
    text: Tensor | None = None
    """If rows hold several texts: the number of each token's text, from 1; 0 is padding."""
    position: Tensor | None = None
    """If rows hold several texts: each token's index within its text."""

    @property
    def targets(self) -> Tensor:
        """Return the tokens that follow the positions, or ``IGNORED`` at padding positions."""
        following = self.ids[self.row, self.column + 1]
        return following if self.filler is None else following.masked_fill(self.filler, IGNORED)


@dataclass(frozen=True)
class Spans:
    """Rows of tokens; in row r, positions ``first[r]`` to ``end[r]`` (exclusive) count. Position p predicts token p + 1."""

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

    def batch(self, rows: Tensor, tokens_to: RoundUp | None = None, positions_to: RoundUp | None = None) -> SpanBatch:
        """Return some rows as a batch; ``tokens_to`` and ``positions_to`` round up the numbers of tokens and positions."""
        rows = rows.cpu()
        ids, mask = self.tokens.padded(rows, self.fill, to=tokens_to)
        row, column = self._positions(rows)
        if positions_to is None:
            return SpanBatch(ids, mask, to_device(row, ids.device), to_device(column, ids.device))
        positions = to_device(_padded_positions(row, column, positions_to), ids.device)
        return SpanBatch(ids, mask, positions[0], positions[1], positions[2].bool())

    def in_few_shapes(
        self, rows: Tensor, tokens_to: RoundUp, width_to: RoundUp, rows_to: RoundUp, positions_to: RoundUp
    ) -> SpanBatch:
        """Return some rows as a batch with a common shape; several texts share a row if that is less to compute."""
        lengths = self.tokens.lengths[rows.cpu()]
        packing = Packing.of(lengths, width_to, rows_to)
        if packing.num_tokens < len(lengths) * tokens_to.apply(int(lengths.max())):
            return self.packed(rows, packing, positions_to)
        return self.batch(rows, tokens_to, positions_to)

    def packed(self, rows: Tensor, packing: Packing, positions_to: RoundUp) -> SpanBatch:
        """Return some rows in the layout of the packing."""
        rows = rows.cpu()
        lengths, device = self.tokens.lengths[rows], self.tokens.flat.device
        within = _counted(lengths)
        target = (packing.row * packing.width + packing.column).repeat_interleave(lengths) + within
        cells = torch.zeros(3, packing.num_tokens, dtype=torch.long)
        number = torch.arange(1, len(rows) + 1).repeat_interleave(lengths)
        cells[:, target] = torch.stack([self.tokens.starts[rows].repeat_interleave(lengths) + within, number, within])
        source, which, position = to_device(cells.view(3, packing.num_rows, packing.width), device)
        text, column = self._positions(rows)
        positions = to_device(_padded_positions(packing.row[text], packing.column[text] + column, positions_to), device)
        mask = (which > 0).long()
        ids = torch.where(which > 0, self.tokens.flat[source].long(), self.fill)
        return SpanBatch(ids, mask, positions[0], positions[1], positions[2].bool(), which, position)

    def _positions(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return (index into ``rows``, token index) of all positions that count."""
        counts = self.counts[rows]
        row = torch.arange(len(rows)).repeat_interleave(counts)
        return row, _counted(counts) + self.first[rows].repeat_interleave(counts)


def _counted(counts: Tensor) -> Tensor:
    """Concatenate 0, 1, ..., count - 1 for every count."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def _padded_positions(row: Tensor, column: Tensor, to: RoundUp) -> Tensor:
    """Return [row, column, is padding] with the number of positions rounded up."""
    positions = torch.zeros(3, to.apply(len(row)), dtype=torch.long)
    positions[:2, : len(row)] = torch.stack([row, column])
    positions[2, len(row) :] = 1
    return positions

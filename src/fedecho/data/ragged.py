"""Rows of different lengths laid end to end on a device, and batches of them padded to the longest of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.core.lanes import sent


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

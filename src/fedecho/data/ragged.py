"""Rows of different lengths laid end to end on a device, and batches of them padded to the longest of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def padded(self, rows: Tensor, fill: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
        """(values, mask), both [rows, longest of them], as int64 on the device; the mask is 1 on what is no padding."""
        rows = rows.cpu()
        lengths, starts = self.lengths[rows], self.starts[rows]
        column = torch.arange(int(lengths.max()))
        within = column - (int(lengths.max()) - lengths)[:, None] if left else column.expand(len(rows), -1)
        mask = (within >= 0) & (within < lengths[:, None])
        at = torch.where(mask, starts[:, None] + within, 0)
        device = self.flat.device
        mask, at = mask.to(device, non_blocking=True), at.to(device, non_blocking=True)
        return torch.where(mask, self.flat[at].long(), fill), mask.long()

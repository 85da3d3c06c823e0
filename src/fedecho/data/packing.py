"""Texts laid one behind the other into rows of one width: padded to its longest, a batch of texts is often half padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.data.ragged import To


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

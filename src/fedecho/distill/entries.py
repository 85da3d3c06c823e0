"""What a bank keeps of each client, within bounds: half precision, a mapped file, the least recently heard given up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedecho.core.memory import ClientMemory, Place, check_place

LARGEST_HALF = 65504.0


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How a bank keeps its entries; without a word, all of them in float32 beside the model.

    ``half``: float16, half the bytes; logits above 65,504 are refused. ``place``: beside the model, in main memory, or in a mapped
    temporary file in ``folder``, which is exact and as large as the disk. ``budget_mb``: the most that sum and entries together may
    take, wherever they lie; of clients that do not fit, those least recently heard are given up and no longer count in the mean.
    """

    half: bool = False
    place: Place | None = None
    folder: str | None = None
    budget_mb: float | None = None

    def __post_init__(self) -> None:
        check_place(self.place, self.folder, "distiller.bank_memory", "distiller.bank_dir")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32

    def most_entries(self, total: Tensor, bytes_beside: int = 0) -> int | None:
        """How many clients the budget holds, each with so many bytes beside its entry; None is any number."""
        if self.budget_mb is None:
            return None
        entry_bytes = total.numel() * self.dtype.itemsize + bytes_beside
        most = int((self.budget_mb * 1e6 - total.nbytes) // entry_bytes)
        if most < 1:
            least = (total.nbytes + entry_bytes) / 1e6
            raise ValueError(
                f"distiller.bank_budget_mb = {self.budget_mb:g} holds not one client: it must be at least {least:.3g}"
            )
        return most

    def entries(self, total: Tensor) -> "dict[int, Tensor] | Entries":
        """A plain dict where nothing was asked for: then the tensors that come in are the entries, without a copy."""
        if not self.half and self.place in (None, "device"):
            return {}
        return Entries(tuple(total.shape), total.device, self)


class Entries:
    """As much of a dict as a bank needs, over rows of a ``ClientMemory``."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, keeping: Keeping) -> None:
        self._shape = shape
        like = torch.empty(shape, device=device).reshape(-1)
        self._memory = ClientMemory(
            2**31 - 1, like, keeping.place or "device", keeping.folder, keeping.dtype, setting="distiller.bank_dir"
        )

    def __len__(self) -> int:
        return len(self._memory)

    def __iter__(self) -> Iterator[int]:
        return iter(self._memory)

    def __getitem__(self, client: int) -> Tensor:
        if client not in self._memory:
            raise KeyError(client)
        return self._memory[client].view(self._shape)

    def get(self, client: int) -> Tensor | None:
        return self[client] if client in self._memory else None

    def __setitem__(self, client: int, entry: Tensor) -> None:
        self._memory[client] = entry.reshape(-1)

    def __delitem__(self, client: int) -> None:
        del self._memory[client]

    def values(self) -> Iterator[Tensor]:
        return (self[client] for client in self._memory)

    def to_tree(self) -> dict[str, Any]:
        return self._memory.to_tree()

    def from_tree(self, tree: dict[str, Any]) -> "Entries":
        self._memory.from_tree(tree)
        return self

"""How a bank stores its entries: in half precision, in main memory or in a mapped file, and within a budget."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedecho.storage.client_memory import ClientMemory, MemoryPlace, check_memory_place


@dataclass(frozen=True, kw_only=True)
class BankStorage:
    """How a bank stores its entries. Default: all of them in float32 on the model's device.

    ``half`` stores float16 at half the size; logits above 65,504 are rejected. ``place`` is the model's device, main memory or a
    memory-mapped temporary file in ``folder``, which is exact and only limited by the disk. ``budget_mb`` limits the size of the
    sum and the entries together; the least recently updated clients that do not fit are dropped from the bank and the mean.
    """

    half: bool = False
    place: MemoryPlace | None = None
    folder: str | None = None
    budget_mb: float | None = None

    def __post_init__(self) -> None:
        check_memory_place(self.place, self.folder, "distiller.bank_memory", "distiller.bank_dir")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32

    def most_entries(self, total: Tensor, prior_bytes: int = 0) -> int | None:
        """Return how many clients fit into the budget, each with ``prior_bytes`` in addition to its entry. None is no limit."""
        if self.budget_mb is None:
            return None
        entry_bytes = total.numel() * self.dtype.itemsize + prior_bytes
        most = int((self.budget_mb * 1e6 - total.nbytes) // entry_bytes)
        if most < 1:
            least = (total.nbytes + entry_bytes) / 1e6
            raise ValueError(
                f"distiller.bank_budget_mb = {self.budget_mb:g} is too small for one client: it must be at least {least:.3g}"
            )
        return most

    def entries(self, total: Tensor) -> "dict[int, Tensor] | Entries":
        """Return an empty container: by default a dict, which stores the tensors themselves without a copy."""
        if not self.half and self.place in (None, "device"):
            return {}
        return Entries(tuple(total.shape), total.device, self)


class Entries:
    """The part of dict's interface that a bank needs, on top of a ``ClientMemory``."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, keeping: BankStorage) -> None:
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

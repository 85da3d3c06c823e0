"""The bank of a language model: the latest word of every client, and a teacher that is made one mini-batch at a time."""

from typing import Any

import torch
from torch import Tensor

from fedecho.core.tokens import Positions
from fedecho.distill.storage import Entry, Storage


class TokenTeacher:
    """``teacher[rows of U]`` is the mean over clients at those rows' positions, [positions, vocabulary]: all of it that ever is."""

    def __init__(self, storage: Storage, entries: list[Entry], positions: Positions) -> None:
        self._storage, self._entries, self._positions = storage, entries, positions

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """One client's rows at a time: those of all would be as many times [positions, vocabulary] where everything is kept."""
        at = self._positions.of(rows).to(self._entries[0][0].device)
        return self._storage.teacher(tuple(tensor[at] for tensor in entry) for entry in self._entries)


class TokenBank:
    """y^i of every client heard so far, as a ``Storage`` keeps it.

    No running sum as in ``Bank``: in float64 it would take as much as four clients in half precision, and the mean over the ten or
    so clients of a language task costs less than the student's own pass over the same mini-batch.
    """

    def __init__(self, storage: Storage, positions: Positions, device: torch.device) -> None:
        self.storage, self.positions, self.device = storage, positions, device
        self.entries: dict[int, Entry] = {}
        self.heard_at: dict[int, int] = {}
        self.num_refused = 0

    def put(self, client: int, entry: Entry, version: int) -> None:
        """Line 5 of Algorithm 1. What is not finite, also because half precision could not hold it, is refused."""
        if not all(bool(torch.isfinite(tensor).all()) for tensor in entry):
            self.num_refused += 1
            return
        self.entries[client] = entry
        self.heard_at[client] = version

    def forget_before(self, version: int) -> None:
        """Clients last heard before that version are teachers no more, until they are heard again."""
        for client in [client for client, heard in self.heard_at.items() if heard < version]:
            del self.entries[client], self.heard_at[client]

    def teacher(self) -> TokenTeacher:
        """Line 14."""
        if not self.entries:
            raise ValueError("no client has been heard yet, so there is no teacher")
        return TokenTeacher(self.storage, list(self.entries.values()), self.positions)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.entries.values() for tensor in entry)

    def bytes_with(self, num_clients: int) -> int:
        """Once so many clients have been heard; every entry is as large as the others."""
        return self.num_bytes // max(len(self), 1) * num_clients

    def mean_age(self, version: int) -> float:
        return version - sum(self.heard_at.values()) / len(self.heard_at) if self.heard_at else 0.0

    def to_tree(self) -> dict[str, Any]:
        entries = {client: list(entry) for client, entry in self.entries.items()}
        return {"entries": entries, "heard_at": self.heard_at, "num_refused": self.num_refused}

    def from_tree(self, tree: dict[str, Any]) -> "TokenBank":
        self.entries = {client: tuple(tensor.to(self.device) for tensor in entry) for client, entry in tree["entries"].items()}
        self.heard_at = dict(tree["heard_at"])
        self.num_refused = tree["num_refused"]
        return self

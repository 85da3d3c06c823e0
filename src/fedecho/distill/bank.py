"""The bank: the latest logits of every client on U, with a running mean whose cost does not grow with the number of clients."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Average = Literal["logits", "probabilities"]


class Bank:
    """y^i of every client heard so far, and their sum.

    The sum is kept in float64: adding the new logits and subtracting the old ones then drifts by some 1e-16 a time, a billion
    arrivals away from being seen in float32. Clients never heard are left out of the mean, not counted as zeros.
    """

    def __init__(self, num_unlabeled: int, num_classes: int, device: torch.device, average: Average = "logits") -> None:
        if average not in ("logits", "probabilities"):
            raise ValueError(f"average must be 'logits' or 'probabilities', got {average!r}")
        self.average: Average = average
        self.total = torch.zeros(num_unlabeled, num_classes, dtype=torch.float64, device=device)
        self.entries: dict[int, Tensor] = {}
        self.heard_at: dict[int, int] = {}
        self._heard_sum = 0

    def put(self, client: int, logits: Float[Tensor, "unlabeled classes"], version: int) -> None:
        """Line 5 of Algorithm 1: the client's newest predictions take the place of its older ones."""
        entry = logits.softmax(dim=-1) if self.average == "probabilities" else logits
        if client in self.entries:
            self.total.sub_(self.entries[client])
        self.total.add_(entry)
        self.entries[client] = entry
        self._heard_sum += version - self.heard_at.get(client, 0)
        self.heard_at[client] = version

    def teacher(self) -> Float[Tensor, "unlabeled classes"]:
        """Line 14: the mean over the clients that have logits. A mean of probabilities comes back as its logarithm."""
        if not self.entries:
            raise ValueError("no client has been heard yet, so there is no teacher")
        mean = (self.total / len(self.entries)).float()
        if self.average == "probabilities":
            return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
        return mean

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return self.total.nbytes + len(self.entries) * self.total.numel() * 4

    def mean_age(self, version: int) -> float:
        """How old the teachers are on average, in versions."""
        return version - self._heard_sum / len(self.heard_at) if self.heard_at else 0.0

    def to_tree(self) -> dict[str, Any]:
        return {"total": self.total, "entries": self.entries, "heard_at": self.heard_at}

    def from_tree(self, tree: dict[str, Any]) -> "Bank":
        device = self.total.device
        self.total = tree["total"].to(device)
        self.entries = {client: entry.to(device) for client, entry in tree["entries"].items()}
        self.heard_at = dict(tree["heard_at"])
        self._heard_sum = sum(self.heard_at.values())
        return self

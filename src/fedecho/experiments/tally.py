"""What a summary says of all updates, counted while they come: a record may hold only a sample of them."""

from collections.abc import Iterable, Mapping
from typing import Any

from fedecho.core.server import Receipt


class Tally:
    """The staleness of accepted updates."""

    def __init__(self) -> None:
        self.accepted = self.staleness_sum = self.staleness_max = 0

    def see(self, receipt: Receipt) -> None:
        if receipt.status == "accepted":
            self._count(receipt.staleness)

    def _count(self, staleness: int) -> None:
        self.accepted += 1
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)

    def staleness(self) -> dict[str, Any]:
        return {"mean_staleness": self.staleness_sum / self.accepted, "max_staleness": self.staleness_max}

    def to_tree(self) -> dict[str, int]:
        return {"accepted": self.accepted, "staleness_sum": self.staleness_sum, "staleness_max": self.staleness_max}

    def from_tree(self, tree: Mapping[str, int]) -> "Tally":
        self.accepted, self.staleness_sum = tree["accepted"], tree["staleness_sum"]
        self.staleness_max = tree["staleness_max"]
        return self

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "Tally":
        """Of a whole record, for a checkpoint from before there were tallies."""
        tally = cls()
        for line in lines:
            if line.get("status") == "accepted":
                tally._count(line["staleness"])
        return tally

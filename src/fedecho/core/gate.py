"""What the border remembers: the usual norm of an update, and who was refused how often."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Any

from fedecho.core.admission import Admission


class Gate:
    """A window of accepted norms, strikes in a row by client, and the clients that are set aside, each until a version."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.norms: list[float] = []
        """The last accepted norms; the oldest is overwritten in turn. ``_sorted`` holds the same."""
        self._sorted: list[float] = []
        self.num_norms = 0
        self.strikes: dict[int, int] = {}
        self.set_aside: dict[int, int] = {}
        self.absent: set[int] = set()
        """Those set aside that have gone away meanwhile."""

    def median(self) -> float | None:
        """None until enough has been seen to call anything usual, and while nothing moves."""
        if self.admission.max_norm_ratio is None or 10 * len(self.norms) < self.admission.norm_window:
            return None
        return self._sorted[len(self._sorted) // 2] or None

    def accepted(self, client: int, norm: float) -> None:
        self.strikes.pop(client, None)
        if len(self.norms) < self.admission.norm_window:
            self.norms.append(norm)
        else:
            place = self.num_norms % len(self.norms)
            del self._sorted[bisect_left(self._sorted, self.norms[place])]
            self.norms[place] = norm
        insort(self._sorted, norm)
        self.num_norms += 1

    def refused(self, client: int, version: int) -> bool:
        """One more strike; True if the client is set aside for it."""
        if not self.admission.max_strikes:
            return False
        self.strikes[client] = self.strikes.get(client, 0) + 1
        if self.strikes[client] < self.admission.max_strikes:
            return False
        del self.strikes[client]
        self.set_aside[client] = version + self.admission.set_aside_versions
        return True

    def returning(self, version: int, *, all_of_them: bool = False) -> Iterator[int]:
        """The clients whose time is over, in the order of their numbers; those who went away do not come back by themselves."""
        for client in sorted(self.set_aside):
            if all_of_them or self.set_aside[client] <= version:
                del self.set_aside[client]
                if client in self.absent:
                    self.absent.remove(client)
                else:
                    yield client

    def joined(self, client: int) -> bool:
        """True if the client must wait: going away and coming back wins nothing."""
        self.absent.discard(client)
        return client in self.set_aside

    def left(self, client: int) -> None:
        if client in self.set_aside:
            self.absent.add(client)

    def to_tree(self) -> dict[str, Any]:
        return {
            "norms": self.norms,
            "num_norms": self.num_norms,
            "strikes": self.strikes,
            "set_aside": self.set_aside,
            "absent": sorted(self.absent),
        }

    def from_tree(self, tree: Mapping[str, Any]) -> "Gate":
        self.norms, self.num_norms = list(tree["norms"]), tree["num_norms"]
        self._sorted = sorted(self.norms)
        self.strikes, self.set_aside = dict(tree["strikes"]), dict(tree["set_aside"])
        self.absent = set(tree["absent"])
        return self

"""Update-norm statistics and per-client strikes, which admission compares updates with."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from math import inf, sqrt
from typing import Any

from torch import Tensor

from fedecho.core.admission import Admission, Norms, norm_of
from fedecho.core.types import GlobalModel

QUORUM = 3
"""How many other clients must have reported before their norms define the usual norm; all others if there are fewer.

Until then the scale of the model defines it.
"""


class NormWindow:
    """The last ``size`` accepted norms and their median."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.norms: list[float] = []
        """A ring buffer: the oldest norm is overwritten. ``_sorted`` holds the same norms."""
        self._sorted: list[float] = []
        self.num_norms = 0

    def median(self) -> float | None:
        """Return the median, or None until a tenth of the window is filled or while it is 0."""
        if 10 * len(self.norms) < self.size:
            return None
        return self._sorted[len(self._sorted) // 2] or None

    def add(self, norm: float) -> None:
        if len(self.norms) < self.size:
            self.norms.append(norm)
        else:
            oldest = self.num_norms % len(self.norms)
            del self._sorted[bisect_left(self._sorted, self.norms[oldest])]
            self.norms[oldest] = norm
        insort(self._sorted, norm)
        self.num_norms += 1

    def to_tree(self) -> dict[str, Any]:
        return {"norms": self.norms, "num_norms": self.num_norms}

    def from_tree(self, tree: Mapping[str, Any]) -> "NormWindow":
        self.norms, self.num_norms = list(tree["norms"]), tree["num_norms"]
        self._sorted = sorted(self.norms)
        return self


class LargestNorms:
    """The largest norm that each of the last ``size`` clients has sent, in accepted or rejected updates.

    There is one value per client, so a client gains nothing by reporting often, and whatever most clients send counts as usual.
    The largest norm is kept because norms shrink as a model converges: a straggler that started from an early version sends an
    update as large as the others' were then.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.largest: dict[int, float] = {}
        """By client, the least recent reporter first. ``_sorted`` holds the same norms."""
        self._sorted: list[float] = []

    def num_others(self, client: int) -> int:
        return len(self.largest) - (client in self.largest)

    def median_of_others(self, client: int) -> float:
        """Return the lower median of the other clients' norms, or 0 if there are none."""
        num = self.num_others(client)
        if not num:
            return 0.0
        middle, own = (num - 1) // 2, self.largest.get(client)
        return self._sorted[middle + (own is not None and bisect_left(self._sorted, own) <= middle)]

    def add(self, client: int, norm: float) -> None:
        previous = self.largest.pop(client, None)
        if previous is not None:
            self._remove(previous)
        elif len(self.largest) == self.size:
            self._remove(self.largest.pop(next(iter(self.largest))))
        self.largest[client] = largest = max(norm, previous or 0.0)
        insort(self._sorted, largest)

    def _remove(self, norm: float) -> None:
        del self._sorted[bisect_left(self._sorted, norm)]

    def to_tree(self) -> list[tuple[int, float]]:
        return list(self.largest.items())

    def from_tree(self, tree: Iterable[tuple[int, float]]) -> "LargestNorms":
        self.largest = dict(tree)
        self._sorted = sorted(self.largest.values())
        return self


class NormMonitor:
    """The usual norms, consecutive strikes by client, and the clients that are set aside, each until a version."""

    def __init__(self, admission: Admission, num_clients: int) -> None:
        self.admission = admission
        self.alone = num_clients == 1
        """There is no other client to compare with."""
        self.quorum = min(QUORUM, max(1, num_clients - 1))
        self.deltas = NormWindow(admission.norm_window)
        self.largest = {kind: LargestNorms(admission.norm_window) for kind in Norms._fields}
        self.strikes: dict[int, int] = {}
        self.set_aside: dict[int, int] = {}
        self.absent: set[int] = set()
        """Clients that left while they were set aside."""

    def usual(self, client: int, norms: Norms, base: GlobalModel) -> Norms | None:
        """Return the norms to compare an update from ``base`` with, or None if no ratio is configured."""
        if self.admission.max_norm_ratio is None:
            return None
        params, buffers = base.weights.params, base.weights.buffers
        return Norms(
            self.deltas.median() or self._usual("delta", client, norms.delta, len(params), params),
            self._usual("statistics", client, norms.statistics, len(buffers), buffers),
            self._usual("correction", client, norms.correction, len(params), base.correction),
        )

    def _usual(self, kind: str, client: int, norm: float, size: int, sent: Tensor | None) -> float:
        """Return the median norm of the other clients, but at least the model's scale: sqrt(n) + the norm of the vector sent.

        This scale suits parameters and statistics. A control variate is a gradient, so for it the scale is used only until
        enough other clients have reported. A run with a single client has nothing to compare with.
        """
        if self.alone:
            return inf
        largest = self.largest[kind]
        median = largest.median_of_others(client) if largest.num_others(client) >= self.quorum else 0.0
        if norm <= median or (median and kind == "correction"):
            return median
        return max(median, sqrt(size) + (0.0 if sent is None else norm_of(sent)))

    def observe(self, client: int, norms: Norms) -> None:
        """Add the finite norms of an update that may still be rejected."""
        for largest, norm in zip(self.largest.values(), norms, strict=True):
            largest.add(client, norm)

    def accepted(self, client: int, norms: Norms) -> None:
        """Clear the client's strikes and add the delta's norm to the window."""
        self.strikes.pop(client, None)
        self.deltas.add(norms.delta)

    def rejected(self, client: int, version: int) -> bool:
        """Add a strike. Return True if the client is now set aside."""
        if not self.admission.max_strikes:
            return False
        self.strikes[client] = self.strikes.get(client, 0) + 1
        if self.strikes[client] < self.admission.max_strikes:
            return False
        del self.strikes[client]
        self.set_aside[client] = version + self.admission.set_aside_versions
        return True

    def returning(self, version: int, *, all_of_them: bool = False) -> Iterator[int]:
        """Yield the clients that may work again, in increasing order. Clients that left in the meantime are not among them."""
        for client in sorted(self.set_aside):
            if all_of_them or self.set_aside[client] <= version:
                del self.set_aside[client]
                if client in self.absent:
                    self.absent.remove(client)
                else:
                    yield client

    def joined(self, client: int) -> bool:
        """Return True if the client is still set aside: leaving and rejoining does not end that."""
        self.absent.discard(client)
        return client in self.set_aside

    def left(self, client: int) -> None:
        if client in self.set_aside:
            self.absent.add(client)

    def to_tree(self) -> dict[str, Any]:
        return {
            "deltas": self.deltas.to_tree(),
            "votes": {kind: largest.to_tree() for kind, largest in self.largest.items()},
            "strikes": self.strikes,
            "set_aside": self.set_aside,
            "absent": sorted(self.absent),
        }

    def from_tree(self, tree: Mapping[str, Any]) -> "NormMonitor":
        self.deltas.from_tree(tree["deltas"])
        for kind, largest in self.largest.items():
            largest.from_tree(tree["votes"][kind])
        self.strikes, self.set_aside = dict(tree["strikes"]), dict(tree["set_aside"])
        self.absent = set(tree["absent"])
        return self

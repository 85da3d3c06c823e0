"""Update-norm statistics and per-client strikes: what admission compares an update with."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from typing import Any

from torch import Tensor

from fedecho.core.admission import Admission, Norms, norm_of
from fedecho.core.types import GlobalModel

QUORUM = 3
"""So many other clients, or all others where there are fewer, say what is usual; until then the scale of the model does."""


class Window:
    """The last accepted norms and their median."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.norms: list[float] = []
        """The oldest is overwritten in turn. ``_sorted`` holds the same."""
        self._sorted: list[float] = []
        self.num_norms = 0

    def median(self) -> float | None:
        """None until enough has been seen to call anything usual, and while nothing moves."""
        if 10 * len(self.norms) < self.size:
            return None
        return self._sorted[len(self._sorted) // 2] or None

    def add(self, norm: float) -> None:
        if len(self.norms) < self.size:
            self.norms.append(norm)
        else:
            place = self.num_norms % len(self.norms)
            del self._sorted[bisect_left(self._sorted, self.norms[place])]
            self.norms[place] = norm
        insort(self._sorted, norm)
        self.num_norms += 1

    def to_tree(self) -> dict[str, Any]:
        return {"norms": self.norms, "num_norms": self.num_norms}

    def from_tree(self, tree: Mapping[str, Any]) -> "Window":
        self.norms, self.num_norms = list(tree["norms"]), tree["num_norms"]
        self._sorted = sorted(self.norms)
        return self


class Votes:
    """The largest norm that each of the last ``size`` clients has sent, refused or not: one vote a client.

    A client that reports often has one vote, one that is always refused is the only one to vote for what it sends, and what most
    clients send is usual however far it goes. The largest counts since norms shrink as a model converges: a straggler that
    started from an early version goes as far as the others did then.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.largest: dict[int, float] = {}
        """In the order in which clients were heard last. ``_sorted`` holds the same norms."""
        self._sorted: list[float] = []

    def num_others(self, client: int) -> int:
        return len(self.largest) - (client in self.largest)

    def median_of_others(self, client: int) -> float:
        """The lower one of an even number, 0 of none. A client has no say in what it is measured by."""
        num = self.num_others(client)
        if not num:
            return 0.0
        middle, own = (num - 1) // 2, self.largest.get(client)
        return self._sorted[middle + (own is not None and bisect_left(self._sorted, own) <= middle)]

    def hear(self, client: int, norm: float) -> None:
        before = self.largest.pop(client, None)
        if before is not None:
            self._forget(before)
        elif len(self.largest) == self.size:
            self._forget(self.largest.pop(next(iter(self.largest))))
        self.largest[client] = largest = max(norm, before or 0.0)
        insort(self._sorted, largest)

    def _forget(self, norm: float) -> None:
        del self._sorted[bisect_left(self._sorted, norm)]

    def to_tree(self) -> list[tuple[int, float]]:
        return list(self.largest.items())

    def from_tree(self, tree: Iterable[tuple[int, float]]) -> "Votes":
        self.largest = dict(tree)
        self._sorted = sorted(self.largest.values())
        return self


class Gate:
    """The usual norms, strikes in a row by client, and the clients that are set aside, each until a version."""

    def __init__(self, admission: Admission, num_clients: int) -> None:
        self.admission = admission
        self.quorum = min(QUORUM, max(1, num_clients - 1))
        self.deltas = Window(admission.norm_window)
        self.votes = {kind: Votes(admission.norm_window) for kind in Norms._fields}
        self.strikes: dict[int, int] = {}
        self.set_aside: dict[int, int] = {}
        self.absent: set[int] = set()
        """Those set aside that have gone away meanwhile."""

    def usual(self, client: int, norms: Norms, base: GlobalModel) -> Norms | None:
        """What the norms of an update to a job from ``base`` are compared with, or None if with nothing."""
        if self.admission.max_norm_ratio is None:
            return None
        params, buffers = base.weights.params, base.weights.buffers
        return Norms(
            self.deltas.median() or self._usual("delta", client, norms.delta, len(params), params),
            self._usual("statistics", client, norms.statistics, len(buffers), buffers),
            self._usual("correction", client, norms.correction, len(params), base.correction),
        )

    def _usual(self, kind: str, client: int, norm: float, size: int, sent: Tensor | None) -> float:
        """The median of the other clients' votes, but not less than the scale of the model: sqrt(n) + the norm of what was sent.

        Parameters and statistics have that scale; a control variate is a gradient, and its scale counts until others have voted.
        """
        votes = self.votes[kind]
        middle = votes.median_of_others(client) if votes.num_others(client) >= self.quorum else 0.0
        if norm <= middle or (middle and kind == "correction"):
            return middle
        return max(middle, sqrt(size) + (0.0 if sent is None else norm_of(sent)))

    def hear(self, client: int, norms: Norms) -> None:
        """Of an update that may yet be refused. Its norms are finite."""
        for votes, norm in zip(self.votes.values(), norms, strict=True):
            votes.hear(client, norm)

    def accepted(self, client: int, norms: Norms) -> None:
        self.strikes.pop(client, None)
        self.deltas.add(norms.delta)

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
            "deltas": self.deltas.to_tree(),
            "votes": {kind: votes.to_tree() for kind, votes in self.votes.items()},
            "strikes": self.strikes,
            "set_aside": self.set_aside,
            "absent": sorted(self.absent),
        }

    def from_tree(self, tree: Mapping[str, Any]) -> "Gate":
        self.deltas.from_tree(tree["deltas"])
        for kind, votes in self.votes.items():
            votes.from_tree(tree["votes"][kind])
        self.strikes, self.set_aside = dict(tree["strikes"]), dict(tree["set_aside"])
        self.absent = set(tree["absent"])
        return self

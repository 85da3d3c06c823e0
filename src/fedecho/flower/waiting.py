"""How long a server waits: for nodes, for answers, between two looks."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

from fedecho.core.ranges import at_least, check_ranges

Seconds = Annotated[float, at_least(0, most=1e8)]
"""Up to three years."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """In seconds. A client's deadline is ``slack`` times its own slowest answer, at least ``least_s``, at most ``timeout_s``.

    With ``timeout_s=None`` there is no deadline: only a node that goes away is given up.
    """

    min_nodes: Annotated[int, at_least(1, most=10**6)] = 1
    """A run begins when so many clients are there."""
    timeout_s: Annotated[float, at_least(0, most=1e300)] | None = 3600.0
    least_s: Seconds = 300.0
    slack: Annotated[float, at_least(1, most=1e6)] = 10.0
    poll_s: Seconds = 0.5
    nodes_s: Seconds = 5.0
    """Between two looks at who is connected."""
    gone_s: Seconds = 30.0
    """For an answer of the SuperLink itself. Then it is gone and the run stops; submitted again, it goes on."""

    def __post_init__(self) -> None:
        check_ranges(self)


class Patience:
    """Learns each client's runtimes. Of a client never heard from nothing is known, and the timeout is its deadline."""

    TTL_FACTOR = 3.0
    """A message past its TTL is lost at the SuperLink without a trace of the node that works on it, so the TTL lies far behind."""
    LONGEST_TTL_S = 10 * 365 * 86400.0
    """Flower needs an end that is a date."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.slowest_s: dict[int, float] = {}

    def saw(self, client: int, runtime_s: float) -> None:
        self.slowest_s[client] = max(self.slowest_s.get(client, 0.0), runtime_s)

    def deadline_s(self, client: int) -> float:
        if self.waiting.timeout_s is None:
            return inf
        if client not in self.slowest_s:
            return self.waiting.timeout_s
        return min(self.waiting.timeout_s, max(self.waiting.least_s, self.waiting.slack * self.slowest_s[client]))

    @property
    def ttl_s(self) -> float:
        """From the slowest answer, and above the timeout, for what is sent now may be awaited that long."""
        if self.waiting.timeout_s is None:
            return self.LONGEST_TTL_S
        slowest = max(self.slowest_s.values(), default=0.0)
        return min(self.LONGEST_TTL_S, self.TTL_FACTOR * max(self.waiting.timeout_s, self.waiting.slack * slowest, 60.0))

"""What an algorithm is: four pure-looking methods on an explicit state. No base class, no registration.

A state passed in is spent: tensors the state OWNS are changed in place, tensors that came in are read only.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fedecho.core.types import Advance, Arrival, GlobalModel

S = TypeVar("S")


class Algorithm(Protocol[S]):
    """A server's method. Write one as a frozen dataclass whose fields are its hyper-parameters."""

    def init(self, model: GlobalModel) -> S:
        """The state before the first arrival."""
        ...

    def receive(self, state: S, arrival: Arrival) -> S:
        """Take one admitted update into the buffer."""
        ...

    def ready(self, state: S) -> bool:
        """Is the buffer full?"""
        ...

    def advance(self, state: S, model: GlobalModel) -> Advance[S]:
        """Make x_{t+1} from x_t and empty the buffer."""
        ...


@dataclass(frozen=True, slots=True)
class Demands:
    """What a method asks of the parties around it. An algorithm that asks nothing need not mention it."""

    synchronous: bool = False
    """The server waits for the whole buffer before it sends any new work."""
    proximal: float = 0.0
    """Clients add proximal / 2 |y - x_s|^2 to their loss."""
    control_variates: bool = False
    """Clients keep c_i, correct every step by c - c_i and report how c_i moved."""
    correct_once: bool = False
    """They correct where they ended up, once, in place of every step."""


def demands(algorithm: Algorithm[Any]) -> Demands:
    """The algorithm's own ``demands``, or none."""
    found = getattr(algorithm, "demands", Demands())
    return found if isinstance(found, Demands) else Demands()

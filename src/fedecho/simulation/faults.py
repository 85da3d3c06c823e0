"""Clients that drop out of a job, and clients that are away for spells."""

from dataclasses import dataclass
from math import log
from typing import Annotated

from fedecho.core.randomness import uniform
from fedecho.core.ranges import Range, check_ranges, share

Spell = Annotated[float, Range(0.001, 1e12)]
"""Shorter ones would mean millions of events for a job."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """``dropout``: the probability that a dispatched client is lost, at a uniform moment of its runtime.

    ``available_s`` and ``unavailable_s``: the mean lengths of a client's alternating spells, exponentially distributed; given
    together or not at all. A client that goes away loses its job, and another takes its slot at once.
    """

    dropout: Annotated[float, share(below=True)] = 0.0
    available_s: Spell | None = None
    unavailable_s: Spell | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "faults.")
        if (self.available_s is None) != (self.unavailable_s is None):
            raise ValueError("faults.available_s and faults.unavailable_s must be given together")

    @property
    def has_spells(self) -> bool:
        return self.available_s is not None

    def drop_after(self, runtime: float, seed: int, dispatch: int) -> float | None:
        """When this dispatch is lost, in seconds after it was sent, or None."""
        if self.dropout == 0.0 or uniform(seed, "dropout", dispatch) >= self.dropout:
            return None
        return runtime * uniform(seed, "dropout moment", dispatch)

    def spell(self, seed: int, client: int, number: int) -> float:
        """The length of a client's spell; even numbers are available ones."""
        mean = self.available_s if number % 2 == 0 else self.unavailable_s
        return -(mean or 0.0) * log(1.0 - uniform(seed, "spell", client, number))

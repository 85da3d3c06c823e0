"""Clients that drop out of a job or are temporarily unavailable."""

from dataclasses import dataclass
from math import log
from typing import Annotated

from fedecho.core.randomness import uniform
from fedecho.core.ranges import Range, check_ranges, share

Spell = Annotated[float, Range(0.001, 1e12)]
"""Mean spell length in seconds; shorter spells would cause millions of events per job."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Client dropout and availability.

    ``dropout`` is the probability that a dispatched client is lost, at a uniformly distributed moment of its runtime.
    ``available_s`` and ``unavailable_s`` are the mean lengths of a client's alternating, exponentially distributed spells; set
    both or neither. A client that leaves loses its job, and another client takes its slot at once.
    """

    dropout: Annotated[float, share(below=True)] = 0.0
    available_s: Spell | None = None
    unavailable_s: Spell | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "faults.")
        if (self.available_s is None) != (self.unavailable_s is None):
            raise ValueError("faults.available_s and faults.unavailable_s must be given together: set both or neither")

    @property
    def has_spells(self) -> bool:
        return self.available_s is not None

    def drop_after(self, runtime: float, seed: int, dispatch: int) -> float | None:
        """Return the seconds after which this dispatch is lost, or None if it is not."""
        if self.dropout == 0.0 or uniform(seed, "dropout", dispatch) >= self.dropout:
            return None
        return runtime * uniform(seed, "dropout moment", dispatch)

    def spell(self, seed: int, client: int, number: int) -> float:
        """Return the length of a client's spell; even numbers are available spells."""
        mean = self.available_s if number % 2 == 0 else self.unavailable_s
        return -(mean or 0.0) * log(1.0 - uniform(seed, "spell", client, number))

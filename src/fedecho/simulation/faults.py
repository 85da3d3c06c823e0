"""Clients that drop out of a job, and clients that are away for spells."""

from dataclasses import dataclass
from math import inf, log

from fedecho.core.rng import uniform


@dataclass(frozen=True, kw_only=True)
class Faults:
    """``dropout``: the probability that a dispatched client is lost, at a uniform moment of its runtime.

    ``available_s`` and ``unavailable_s``: the mean lengths of a client's alternating spells, exponentially distributed; given
    together or not at all. A client that goes away loses its job, and another takes its slot at once.
    """

    dropout: float = 0.0
    available_s: float | None = None
    unavailable_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"faults.dropout must be at least 0 and below 1, got {self.dropout}")
        if (self.available_s is None) != (self.unavailable_s is None):
            raise ValueError("faults.available_s and faults.unavailable_s must be given together")
        for name in ("available_s", "unavailable_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"faults.{name} must be above 0 and finite, got {value}")

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

"""How much a stale update counts: plain functions s(tau), chosen by name."""

from collections.abc import Callable
from typing import Annotated, Literal

from fedecho.core.ranges import Factor, at_least

Staleness = Callable[[int], float]
StalenessName = Literal["constant", "polynomial", "hinge"]
Power = Annotated[float, at_least(0, most=100)]
Slope = Factor
Grace = Annotated[int, at_least(0)]


def constant(tau: int) -> float:
    return 1.0


def polynomial(power: float) -> Staleness:
    """(1 + tau)^-p: for p = 1/2 that is 1 / sqrt(1 + tau).

    >>> polynomial(0.5)(3)
    0.5
    """
    return lambda tau: float((1 + tau) ** -power)


def hinge(slope: float, grace: int) -> Staleness:
    """1 up to ``grace`` versions, then 1 / (slope (tau - grace) + 1): without a jump at the hinge.

    >>> hinge(10.0, 4)(4), hinge(10.0, 4)(5)
    (1.0, 0.09090909090909091)
    """
    return lambda tau: 1.0 if tau <= grace else 1.0 / (slope * (tau - grace) + 1.0)


def staleness_weight(name: StalenessName, power: float, slope: float = 10.0, grace: int = 4) -> Staleness:
    match name:
        case "constant":
            return constant
        case "polynomial":
            return polynomial(power)
        case "hinge":
            return hinge(slope, grace)
    raise ValueError(f"staleness must be 'constant', 'polynomial' or 'hinge', got {name!r}")

"""Log-log slopes with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for a two-sided 95 % at 1, 2, ... degrees of freedom; a normal's 1.96 beyond."""


@dataclass(frozen=True)
class Line:
    """log y = log scale + exponent log x. ``error`` is the exponent's standard error; None where two points leave no residual."""

    exponent: float
    scale: float
    error: float | None

    def at(self, x: float) -> float:
        return self.scale * x**self.exponent


def power_law(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares on logarithms.

    >>> line = power_law([1, 10, 100], [3, 30, 300])
    >>> round(line.exponent, 6), round(line.scale, 6), round(line.error, 6)
    (1.0, 3.0, 0.0)
    """
    if len(x) != len(y) or len(set(x)) < 2:
        raise ValueError(f"a line needs two different x and as many y, got {list(x)} and {list(y)}")
    if min(*x, *y) <= 0:
        raise ValueError(f"logarithms need numbers above 0, got {list(x)} and {list(y)}")
    across, up = np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float))
    apart = across - across.mean()
    exponent = float(apart @ up / (apart @ apart))
    residuals = up - up.mean() - exponent * apart
    free = len(across) - 2
    error = sqrt(float(residuals @ residuals) / free / float(apart @ apart)) if free else None
    return Line(exponent, exp(float(up.mean()) - exponent * float(across.mean())), error)


@dataclass(frozen=True)
class Interval:
    """A mean over independent repeats and the half width of its 95 % confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Student's interval for the mean.

    >>> str(interval([-0.5, -0.6, -0.4]))
    '-0.500 ± 0.248'
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs two values at least, got {len(values)}")
    quantile = T_975[len(values) - 2] if len(values) - 2 < len(T_975) else 1.96
    return Interval(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / sqrt(len(values)))


def halvings(first: float, last: float, factor: float = 2.0) -> list[float]:
    """first, first * factor, ... up to last: evenly spaced on a logarithmic axis."""
    return [first * factor**k for k in range(round(log(last / first) / log(factor)) + 1)]

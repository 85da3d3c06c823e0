"""Who is let in. An update is checked here once, at the border; behind it every algorithm trusts the type."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fedecho.core.ranges import at_least, check_ranges, positive
from fedecho.core.types import ClientUpdate, GlobalModel

MAX_NAME = 100
"""The longest name of a metric."""
MOST_NORM = 3.4e38
"""float32 holds hardly more."""
NOT_FINITE = "not finite"
"""The code of an update that holds a NaN or an infinity."""


class Fault(NamedTuple):
    """Why an update was refused: a word to count by, and the whole story for the record."""

    code: str
    text: str


class Norms(NamedTuple):
    """How far an update goes: the L2 norms of its delta, of its statistics' move from the base's, and of its correction."""

    delta: float
    statistics: float = 0.0
    correction: float = 0.0

    @classmethod
    def of(cls, update: ClientUpdate, base: GlobalModel) -> "Norms":
        """Not finite where any entry is not: one pass answers both questions."""
        moved = update.buffers - base.weights.buffers
        return cls(norm_of(update.delta), norm_of(moved), 0.0 if update.correction is None else norm_of(update.correction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The bounds on an update, and what becomes of a client that keeps breaking them. The defaults refuse no honest client.

    ``max_norm`` bounds the L2 norms of a delta, of the statistics' move away from the base version's and of a control variate's
    move. ``max_norm_ratio`` bounds a delta by a multiple of the running median of the last ``norm_window`` accepted norms, once a
    tenth of the window is filled. Before that, and for the other two always, it bounds each by a multiple of what is usual among
    the other clients and for the model (core/norm_monitor.py). None is no bound. A client refused ``max_strikes`` times in a
    row gets no work for ``set_aside_versions`` versions; 0 strikes sets nobody aside.
    """

    max_norm: Annotated[float, positive(most=MOST_NORM)] | None = None
    max_norm_ratio: Annotated[float, at_least(1, most=MOST_NORM)] | None = 100.0
    norm_window: Annotated[int, at_least(10, most=10**6)] = 200
    max_examples: Annotated[int, at_least(1, most=2**53)] = 1_000_000_000
    max_steps: Annotated[int, at_least(1, most=2**53)] = 1_000_000_000
    max_metrics: Annotated[int, at_least(0, most=10**6)] = 64
    max_bytes: Annotated[int, at_least(1, most=2**63 - 1)] = 16 * 2**30
    max_strikes: Annotated[int, at_least(0)] = 5
    set_aside_versions: Annotated[int, at_least(0)] = 10

    def __post_init__(self) -> None:
        check_ranges(self, "admission.")

    def fault(
        self, update: ClientUpdate, norms: Norms, usual: Norms | None, variances: Tensor | None, wants_correction: bool
    ) -> Fault | None:
        """Why the update is refused, or None.

        ``usual`` is what its norms are compared with, if with anything; ``variances`` says which of the statistics are.
        """
        return (
            self._delta_fault(norms.delta, usual)
            or self._statistics_fault(update, norms.statistics, usual, variances)
            or self._correction_fault(update, norms.correction, usual, wants_correction)
            or self._range_fault(update)
            or self._metrics_fault(update)
        )

    def too_large(self, update: ClientUpdate) -> Fault | None:
        """More bytes than a message may have."""
        tensors = [update.delta, update.buffers, *([] if update.correction is None else [update.correction])]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return Fault("too large", f"update has {size} bytes, more than {self.max_bytes}") if size > self.max_bytes else None

    def _delta_fault(self, norm: float, usual: Norms | None) -> Fault | None:
        if not isfinite(norm):
            return Fault(NOT_FINITE, "delta is not finite")
        return self._above(norm, None if usual is None else usual.delta, "norm", "delta's norm")

    def _statistics_fault(
        self, update: ClientUpdate, moved: float, usual: Norms | None, variances: Tensor | None
    ) -> Fault | None:
        if not isfinite(moved):
            return _overflow(update.buffers, "buffers are not finite", "statistics")
        if variances is not None and len(variances) and (least := update.buffers.where(variances, 0.0).min().item()) < 0:
            return Fault("variance", f"a variance is {least:.4g}, below 0")
        return self._above(moved, None if usual is None else usual.statistics, "statistics", "statistics' move")

    def _correction_fault(self, update: ClientUpdate, norm: float, usual: Norms | None, wants_correction: bool) -> Fault | None:
        if update.correction is None:
            return Fault("correction", "correction is missing") if wants_correction else None
        if not isfinite(norm):
            return _overflow(update.correction, "correction is not finite", "correction norm")
        return self._above(norm, None if usual is None else usual.correction, "correction norm", "correction's norm")

    def _above(self, norm: float, usual: float | None, code: str, what: str) -> Fault | None:
        if self.max_norm is not None and norm > self.max_norm:
            return Fault(code, f"{what} {norm:.4g} is above the bound {self.max_norm:.4g}")
        if self.max_norm_ratio is not None and usual is not None and norm > self.max_norm_ratio * usual:
            return Fault(code, f"{what} {norm:.4g} is above {self.max_norm_ratio:.4g} times the usual norm {usual:.4g}")
        return None

    def _range_fault(self, update: ClientUpdate) -> Fault | None:
        examples, steps = update.num_examples, update.num_steps
        if type(examples) not in (int, float) or not 0 < examples <= self.max_examples:
            return Fault("num_examples", f"num_examples {said(examples)} is not above 0 and at most {self.max_examples}")
        if type(steps) is not int or not 1 <= steps <= self.max_steps:
            return Fault("num_steps", f"num_steps {said(steps)} is outside 1 to {self.max_steps}")
        return None

    def _metrics_fault(self, update: ClientUpdate) -> Fault | None:
        if len(update.metrics) > self.max_metrics:
            return Fault("metrics", f"there are {len(update.metrics)} metrics, more than {self.max_metrics}")
        for name, value in update.metrics.items():
            if not isinstance(name, str) or len(name) > MAX_NAME:
                return Fault("metrics", f"a metric's name is no string of at most {MAX_NAME} characters")
            if not isinstance(value, int | float) or not isfinite(value):
                return Fault("metrics", f"metric {name!r} is not a finite number")
        return None


def _overflow(tensor: Tensor, text: str, code: str) -> Fault:
    """Of a norm that is not finite, though perhaps every entry is: 1e30 squared is not a float32."""
    return Fault(code, f"{code} is beyond float32") if tensor.isfinite().all() else Fault(NOT_FINITE, text)


def said(value: object) -> str:
    """What a client claims, short enough for a record."""
    try:
        text = str(value)
    except Exception:  # of a number with more digits than Python writes, or of an object that will not be shown
        return f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:40] + "..."


def mistyped(update: ClientUpdate) -> Fault | None:
    """Fields that are not what they are declared to be. No wire brings them; a transport of somebody's own may."""
    optional = () if update.correction is None else ("correction",)
    for name in ("delta", "buffers", *optional):
        if type(getattr(update, name)) is not Tensor:  # a subclass may do anything when it is added
            return Fault("wrong kind", f"{name} is a {type(getattr(update, name)).__name__} and no plain tensor")
    if type(update.base_version) is not int:
        return Fault("wrong kind", f"base_version is a {type(update.base_version).__name__} and no whole number")
    if not isinstance(update.metrics, Mapping):
        return Fault("wrong kind", f"metrics are a {type(update.metrics).__name__} and no mapping")
    return None


def misfit(update: ClientUpdate, base: GlobalModel) -> Fault | None:
    """Tensors of the wrong length or kind, or None. Comes before anything computes with them."""
    wanted = {"delta": (update.delta, base.weights.params), "buffers": (update.buffers, base.weights.buffers)}
    if update.correction is not None:
        wanted["correction"] = (update.correction, base.weights.params)
    for name, (got, like) in wanted.items():
        if got.shape != like.shape:
            return Fault("wrong shape", f"{name} has shape {tuple(got.shape)}, not {tuple(like.shape)}")
        if got.dtype != like.dtype:
            return Fault("wrong dtype", f"{name} has dtype {got.dtype}, not {like.dtype}")
        if got.layout != like.layout or got.device != like.device:
            return Fault("wrong kind", f"{name} is {got.layout} on {got.device}, not {like.layout} on {like.device}")
        if got.requires_grad:
            return Fault("wrong kind", f"{name} still asks for gradients")
    return None


def norm_of(tensor: Tensor) -> float:
    """Not finite if any entry is not."""
    norm: float = torch.linalg.vector_norm(tensor).item()
    return norm

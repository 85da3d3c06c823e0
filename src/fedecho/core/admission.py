"""Validates client updates. Algorithms only receive updates that passed these checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fedecho.core.ranges import MAX_FLOAT32, at_least, check_ranges, positive
from fedecho.core.types import ClientUpdate, GlobalModel

MAX_NAME = 100
"""Maximum length of a metric's name."""
NOT_FINITE = "not finite"
"""The code for updates that contain a NaN or an infinity."""


class Rejection(NamedTuple):
    """Why an update was rejected: an error code, which is counted, and a message for the record."""

    code: str
    text: str


class Norms(NamedTuple):
    """L2 norms of an update: of its delta, of the change in its statistics since the base version, and of its correction."""

    delta: float
    statistics: float = 0.0
    correction: float = 0.0

    @classmethod
    def of(cls, update: ClientUpdate, base: GlobalModel) -> "Norms":
        """Measure an update. A norm is not finite if any entry is not, so one pass checks both."""
        moved = update.buffers - base.weights.buffers
        return cls(norm_of(update.delta), norm_of(moved), 0.0 if update.correction is None else norm_of(update.correction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Bounds on client updates, and the penalty for clients that keep exceeding them.

    A bound of None is no bound. The defaults accept honest clients, with one known exception: once most clients have converged,
    ``max_norm_ratio`` may refuse stragglers that hold other data.

    ``max_norm`` bounds three L2 norms: of the delta, of the change in the statistics and of the change in the control variate.
    ``max_norm_ratio`` bounds a delta by a multiple of the running median of the last ``norm_window`` accepted norms, once a tenth
    of the window is filled. Before that, and always for the other two norms, it bounds each by a multiple of the usual norm of
    the other clients and the scale of the model (core/norm_monitor.py). A client rejected ``max_strikes`` times in a row gets no
    work for ``set_aside_versions`` versions; ``max_strikes = 0`` disables this.
    """

    max_norm: Annotated[float, positive(most=MAX_FLOAT32)] | None = None
    max_norm_ratio: Annotated[float, at_least(1, most=MAX_FLOAT32)] | None = 100.0
    norm_window: Annotated[int, at_least(10, most=10**6)] = 200
    max_examples: Annotated[int, at_least(1, most=2**53)] = 1_000_000_000
    max_steps: Annotated[int, at_least(1, most=2**53)] = 1_000_000_000
    max_metrics: Annotated[int, at_least(0, most=10**6)] = 64
    max_bytes: Annotated[int, at_least(1, most=2**63 - 1)] = 16 * 2**30
    max_strikes: Annotated[int, at_least(0)] = 5
    set_aside_versions: Annotated[int, at_least(0)] = 10

    def __post_init__(self) -> None:
        check_ranges(self, "admission.")

    def check(
        self, update: ClientUpdate, norms: Norms, usual: Norms | None, variances: Tensor | None, wants_correction: bool
    ) -> Rejection | None:
        """Return why the update is rejected, or None.

        ``usual`` are the norms to compare with, if any; ``variances`` is a mask of the statistics that are variances.
        """
        return (
            self._check_delta(norms.delta, usual)
            or self._check_statistics(update, norms.statistics, usual, variances)
            or self._check_correction(update, norms.correction, usual, wants_correction)
            or self._check_counts(update)
            or self._check_metrics(update)
        )

    def check_size(self, update: ClientUpdate) -> Rejection | None:
        """Reject an update with more bytes than a message may have."""
        tensors = [update.delta, update.buffers, *([] if update.correction is None else [update.correction])]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return Rejection("too large", f"update has {size} bytes, more than {self.max_bytes}") if size > self.max_bytes else None

    def _check_delta(self, norm: float, usual: Norms | None) -> Rejection | None:
        if not isfinite(norm):
            return Rejection(NOT_FINITE, "delta is not finite")
        return self._check_bounds(norm, None if usual is None else usual.delta, "norm", "delta's norm")

    def _check_statistics(
        self, update: ClientUpdate, moved: float, usual: Norms | None, variances: Tensor | None
    ) -> Rejection | None:
        if not isfinite(moved):
            return _overflow(update.buffers, "buffers are not finite", "statistics")
        if variances is not None and len(variances) and (least := update.buffers.where(variances, 0.0).min().item()) < 0:
            return Rejection("variance", f"a variance is {least:.4g}, below 0")
        return self._check_bounds(moved, None if usual is None else usual.statistics, "statistics", "statistics' move")

    def _check_correction(
        self, update: ClientUpdate, norm: float, usual: Norms | None, wants_correction: bool
    ) -> Rejection | None:
        if update.correction is None:
            return Rejection("correction", "correction is missing") if wants_correction else None
        if not isfinite(norm):
            return _overflow(update.correction, "correction is not finite", "correction norm")
        return self._check_bounds(norm, None if usual is None else usual.correction, "correction norm", "correction's norm")

    def _check_bounds(self, norm: float, usual: float | None, code: str, what: str) -> Rejection | None:
        if self.max_norm is not None and norm > self.max_norm:
            return Rejection(code, f"{what} {norm:.4g} is above the bound {self.max_norm:.4g}")
        if self.max_norm_ratio is not None and usual is not None and norm > self.max_norm_ratio * usual:
            return Rejection(code, f"{what} {norm:.4g} is above {self.max_norm_ratio:.4g} times the usual norm {usual:.4g}")
        return None

    def _check_counts(self, update: ClientUpdate) -> Rejection | None:
        examples, steps = update.num_examples, update.num_steps
        if type(examples) not in (int, float) or not 0 < examples <= self.max_examples:
            return Rejection("num_examples", f"num_examples {brief(examples)} is not above 0 and at most {self.max_examples}")
        if type(steps) is not int or not 1 <= steps <= self.max_steps:
            return Rejection("num_steps", f"num_steps {brief(steps)} is outside 1 to {self.max_steps}")
        return None

    def _check_metrics(self, update: ClientUpdate) -> Rejection | None:
        if len(update.metrics) > self.max_metrics:
            return Rejection("metrics", f"there are {len(update.metrics)} metrics, more than {self.max_metrics}")
        for name, value in update.metrics.items():
            if not isinstance(name, str) or len(name) > MAX_NAME:
                return Rejection("metrics", f"a metric's name is not a string of at most {MAX_NAME} characters")
            if not isinstance(value, int | float) or not isfinite(value):
                return Rejection("metrics", f"metric {name!r} is not a finite number")
        return None


def _overflow(tensor: Tensor, text: str, code: str) -> Rejection:
    """Explain a norm that is not finite. Every entry may still be finite: 1e30 squared overflows float32."""
    return Rejection(code, f"{code} is beyond float32") if tensor.isfinite().all() else Rejection(NOT_FINITE, text)


def brief(value: object) -> str:
    """Format a value from a client, shortened to fit a record."""
    try:
        text = str(value)
    except Exception:  # a number with more digits than Python prints, or an object whose __str__ raises
        return f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:40] + "..."


def check_types(update: ClientUpdate) -> Rejection | None:
    """Reject fields of the wrong type. The package's transports never produce them; a custom transport might."""
    optional = () if update.correction is None else ("correction",)
    for name in ("delta", "buffers", *optional):
        if type(getattr(update, name)) is not Tensor:  # a subclass can override any operation
            return Rejection("wrong kind", f"{name} is a {type(getattr(update, name)).__name__}, not a plain tensor")
    if type(update.base_version) is not int:
        return Rejection("wrong kind", f"base_version is a {type(update.base_version).__name__}, not an int")
    if not isinstance(update.metrics, Mapping):
        return Rejection("wrong kind", f"metrics is a {type(update.metrics).__name__}, not a mapping")
    return None


def check_tensors(update: ClientUpdate, base: GlobalModel) -> Rejection | None:
    """Reject tensors of the wrong shape, dtype, layout or device. Must run before any computation with them."""
    expected = {"delta": (update.delta, base.weights.params), "buffers": (update.buffers, base.weights.buffers)}
    if update.correction is not None:
        expected["correction"] = (update.correction, base.weights.params)
    for name, (got, like) in expected.items():
        if got.shape != like.shape:
            return Rejection("wrong shape", f"{name} has shape {tuple(got.shape)}, not {tuple(like.shape)}")
        if got.dtype != like.dtype:
            return Rejection("wrong dtype", f"{name} has dtype {got.dtype}, not {like.dtype}")
        if got.layout != like.layout or got.device != like.device:
            return Rejection("wrong kind", f"{name} is {got.layout} on {got.device}, not {like.layout} on {like.device}")
        if got.requires_grad:
            return Rejection("wrong kind", f"{name} still requires gradients")
    return None


def norm_of(tensor: Tensor) -> float:
    """Return the L2 norm, which is not finite if any entry is not."""
    norm: float = torch.linalg.vector_norm(tensor).item()
    return norm

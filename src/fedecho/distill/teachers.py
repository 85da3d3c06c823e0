"""Combining all clients' logits into one teacher: robust rules and the correction for each client's label prior."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

TeacherRule = Literal["mean", "median", "trimmed", "entropy"]
TINY = torch.finfo(torch.float32).tiny
CHUNK_VALUES = 2**24
"""The most values to sort at once; all clients' logits together may be far more."""


def robust_teacher(entries: Iterable[Tensor], rule: TeacherRule, trim: float, *, probabilities: bool = False) -> Tensor:
    """Combine all clients' entries, logits or ``probabilities``, into the teacher on U, some rows of U at a time.

    Half-precision entries are combined in float32: in float16 the sum of two logits may overflow and small weights become 0.
    """
    entries = list(entries)
    rows = max(1, CHUNK_VALUES // (len(entries) * entries[0].shape[-1]))
    chunks = (
        torch.stack([_widened(entry) for entry in part]) for part in zip(*(entry.split(rows) for entry in entries), strict=True)
    )
    return torch.cat([_combined(chunk, rule, trim, probabilities) for chunk in chunks])


def _widened(entry: Tensor) -> Tensor:
    return entry.float() if entry.dtype.itemsize < 4 else entry


def _combined(entries: Tensor, rule: TeacherRule, trim: float, probabilities: bool) -> Tensor:
    """Combine entries of [clients, rows, classes] into [rows, classes]."""
    if rule == "entropy":
        return _by_certainty(entries, entries.clamp_min(TINY).log() if probabilities else entries.log_softmax(dim=-1))
    if rule == "median":
        return median(entries)
    return trimmed_mean(entries, trim)


def median(values: Tensor) -> Tensor:
    """Return the median over the first axis; for an even number of values, the mean of the middle two."""
    ordered, num = values.sort(dim=0).values, len(values)
    return (ordered[(num - 1) // 2] + ordered[num // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """Return the mean over the first axis without the lowest and highest share ``trim`` of the values."""
    cut = min(int(trim * len(values)), (len(values) - 1) // 2)
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)


def _by_certainty(entries: Tensor, log_probabilities: Tensor) -> Tensor:
    """Weight each client by (1 - H / ln C)^2 on each row, so that uncertain clients count less there."""
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1) / log(max(entries.shape[-1], 2))
    weight = (1 - entropy).clamp_min(1e-6).square()[..., None]
    return (weight * entries).sum(dim=0) / weight.sum(dim=0)


@dataclass(frozen=True, kw_only=True)
class PriorCorrection:
    """Replaces y^i by y^i - s log(C pi_i), with pi_i at least ``floor`` / C, and adds t s log(C mean pi_i) to the teacher.

    ``strength`` is s: 0 is the paper, 1 the full correction. ``shared`` is t: 1 replaces each client's own prior by the mean of
    all clients' priors, which is safer if U's labels are skewed; 0 leaves no prior. The factors C change no prediction; they leave
    a client with a uniform mean prediction unchanged.
    """

    strength: float = 0.0
    floor: float = 0.01
    shared: float = 0.0

    def __post_init__(self) -> None:
        if self.shared and not self.strength:
            raise ValueError("distiller.shared_prior has no effect while distiller.prior_correction is 0: set both")

    def prior_of(self, logits: Float[Tensor, "unlabeled classes"]) -> Float[Tensor, " classes"]:
        """Return pi_i: the mean prediction on U, floored and normalised."""
        floored = logits.softmax(dim=-1).mean(dim=0).clamp_min(self.floor / logits.shape[-1])
        return floored / floored.sum()

    def evidence(self, prior: Float[Tensor, " classes"]) -> Float[Tensor, " classes"]:
        """Return s log(C pi), which is subtracted from the logits of a client with this prior."""
        return self.strength * (prior * len(prior)).log()


class Priors:
    """pi_i of every client in the bank, and their sum, in float64 like the sum of the logits."""

    def __init__(self, correction: PriorCorrection, num_classes: int, device: torch.device) -> None:
        self.correction = correction
        self.total = torch.zeros(num_classes, dtype=torch.float64, device=device)
        self.of: dict[int, Tensor] = {}

    @property
    def entry_bytes(self) -> int:
        return 4 * len(self.total)

    def put(self, client: int, prior: Float[Tensor, " classes"]) -> None:
        self.drop(client)
        self.of[client] = prior
        self.total.add_(prior)

    def drop(self, client: int) -> None:
        old = self.of.pop(client, None)
        if old is not None:
            self.total.sub_(old)

    def shared_evidence(self) -> Float[Tensor, " classes"]:
        """Return t s log(C mean pi_i), which is added to the teacher."""
        mean = (self.total / len(self.of)).float()
        return self.correction.shared * self.correction.evidence(mean)

    def to_tree(self) -> dict[str, Any]:
        return {"total": self.total, "of": self.of}

    def from_tree(self, tree: dict[str, Any]) -> "Priors":
        device = self.total.device
        self.total = tree["total"].to(device)
        self.of = {client: prior.to(device) for client, prior in tree["of"].items()}
        return self


COVERS = 0.5
"""A client covers a class if its mean prediction gives the class at least this part of the uniform share 1 / C."""


class ClassCoverage:
    """How many clients cover each class. It is derived from the bank's entries, so a checkpoint does not hold it."""

    def __init__(self, num_classes: int) -> None:
        self._total = np.zeros(num_classes, dtype=np.int64)
        self._covers: dict[int, bytes] = {}
        """A byte by class, 1 or 0. A tensor would take ten times as much, for each client."""
        self._changed: set[int] = set()

    def changed(self, client: int) -> None:
        """Note that the client's entry is new."""
        self.dropped(client)
        self._changed.add(client)

    def dropped(self, client: int) -> None:
        self._changed.discard(client)
        old = self._covers.pop(client, None)
        if old is not None:
            self._total -= np.frombuffer(old, dtype=np.uint8)

    def counts(self, mean_prediction: Callable[[int], Float[Tensor, " classes"]]) -> list[int]:
        """Return the number of clients by class, given the mean prediction of any client."""
        if self._changed:
            predictions = torch.stack([mean_prediction(client) for client in self._changed])
            covers = (predictions * len(self._total) >= COVERS).to("cpu", torch.uint8).numpy()
            self._total += covers.sum(axis=0, dtype=np.int64)
            self._covers |= {client: row.tobytes() for client, row in zip(self._changed, covers, strict=True)}
            self._changed.clear()
        counts: list[int] = self._total.tolist()
        return counts

"""The bank of every client's latest logits on U, with a running mean at a cost independent of N."""

from collections import OrderedDict
from math import isfinite
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedecho.distill.bank_storage import BankStorage, Entries
from fedecho.distill.teachers import TINY, ClassCoverage, PriorCorrection, Priors, TeacherRule, robust_teacher

LARGEST_HALF = 65504.0
"""The largest float16."""


Average = Literal["logits", "probabilities"]


class Bank:
    """y^i of every client that has reported, and their sum.

    The sum is in float64: adding new logits and subtracting old ones drifts by about 1e-16 each time, far below float32's
    precision. After a very large entry leaves, the sum is computed afresh, as subtraction would cancel the other entries. Logits
    that are not finite are rejected. Clients that have not reported are left out of the mean, not counted as zeros.

    A ``rule`` other than the mean combines all entries at each version (distill/teachers.py). ``keeping`` says how entries are
    stored. The sum is over the entries as stored (rounded to float16 if ``half``), so that removing one leaves no residue. With a
    ``correction``, each client's own prior is removed from its logits before they are stored.
    """

    LARGE = 1e6
    """An entry above this is not subtracted from the sum; the sum is computed afresh."""

    def __init__(
        self,
        num_unlabeled: int,
        num_classes: int,
        device: torch.device,
        average: Average = "logits",
        rule: TeacherRule = "mean",
        trim: float = 0.2,
        keeping: BankStorage | None = None,
        correction: PriorCorrection | None = None,
    ) -> None:
        if average not in ("logits", "probabilities"):
            raise ValueError(f"average must be 'logits' or 'probabilities', got {average!r}")
        self.average: Average = average
        self.rule: TeacherRule = rule
        self.trim = trim
        self.total = torch.zeros(num_unlabeled, num_classes, dtype=torch.float64, device=device)
        self.keeping = keeping or BankStorage()
        self.entries = self.keeping.entries(self.total)
        self.heard_at: OrderedDict[int, int] = OrderedDict()
        """The version of each client's last report, the oldest first."""
        self.num_refused = self.num_dropped = 0
        corrects = correction is not None and correction.strength > 0
        self.priors = Priors(correction, num_classes, device) if correction is not None and corrects else None
        """None without a correction."""
        self._coverage = ClassCoverage(num_classes)
        self._most_entries = self.keeping.most_entries(self.total, self._prior_bytes)
        self._large: set[int] = set()
        self._heard_sum = 0

    def put(self, client: int, logits: Float[Tensor, "unlabeled classes"], version: int) -> None:
        """Line 5 of Algorithm 1: replace the client's previous logits by its new ones."""
        prior = None if self.priors is None else self.priors.correction.prior_of(logits)
        if self.priors is not None and prior is not None:
            logits = logits - self.priors.correction.evidence(prior)
        largest = float(logits.abs().max())
        too_large = self.keeping.half and self.average == "logits" and largest > LARGEST_HALF
        if too_large or not isfinite(largest):
            self.num_refused += 1  # the client's previous logits stay
            return
        self._make_room_for(client)
        entry = (logits.softmax(dim=-1) if self.average == "probabilities" else logits).to(self.keeping.dtype)
        old = self.entries.get(client)
        if client in self._large:
            self.entries[client] = entry
            self._large.discard(client)
            self._recompute_sum()
        else:
            if old is not None:
                self.total.sub_(old)  # before it is overwritten, as it may be a view
            self.entries[client] = entry
            self.total.add_(entry)
        if self.average == "logits" and largest > self.LARGE:
            self._large.add(client)
        if self.priors is not None and prior is not None:
            self.priors.put(client, prior)
        self._coverage.changed(client)
        self._heard_sum += version - self.heard_at.get(client, 0)
        self.heard_at[client] = version
        self.heard_at.move_to_end(client)

    def _make_room_for(self, client: int) -> None:
        """Drop the least recently updated client if a new one exceeds the budget."""
        if self._most_entries is None or client in self.heard_at or len(self.entries) < self._most_entries:
            return
        self._drop_oldest()
        self.num_dropped += 1

    def forget_before(self, version: int) -> None:
        """Drop the clients whose last report is from before ``version``."""
        while self.heard_at and next(iter(self.heard_at.values())) < version:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped, version = self.heard_at.popitem(last=False)
        self._heard_sum -= version
        self._coverage.dropped(dropped)
        if self.priors is not None:
            self.priors.drop(dropped)
        if dropped in self._large:
            del self.entries[dropped]
            self._large.discard(dropped)
            self._recompute_sum()
        else:
            self.total.sub_(self.entries[dropped])
            del self.entries[dropped]

    def _recompute_sum(self) -> None:
        self.total.zero_()
        for entry in self.entries.values():
            self.total.add_(entry)

    def teacher(self) -> Float[Tensor, "unlabeled classes"]:
        """Line 14: return the mean over the clients in the bank. A mean of probabilities is returned as its logarithm."""
        if not len(self.entries):
            raise ValueError("there is no teacher: no client has reported yet")
        mean = (self.total / len(self.entries)).float() if self.rule == "mean" else self._robust()
        if self.average == "probabilities":
            mean = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
        if self.priors is not None and self.priors.correction.shared:
            mean = mean + self.priors.shared_evidence()
        return mean

    def _robust(self) -> Tensor:
        """Combine the entries in the order of the clients, so that sums round the same after a resume."""
        entries = (self.entries[client] for client in sorted(self.entries))
        return robust_teacher(entries, self.rule, self.trim, probabilities=self.average == "probabilities").float()

    def mean_prediction(self, client: int) -> Float[Tensor, " classes"]:
        """Return the mean prediction on U of the client's own model, which estimates its label distribution.

        It is computed from the entry as stored, with the correction undone, so that it is the same after a resume.
        """
        logits = self.entries[client].float()
        if self.average == "probabilities":
            logits = logits.clamp_min(TINY).log()
        if self.priors is not None:
            logits = logits + self.priors.correction.evidence(self.priors.of[client])
        return logits.softmax(dim=-1).mean(dim=0)

    def coverage(self) -> list[int]:
        """Return how many clients have evidence for each class. Only clients with new entries since the last call are evaluated."""
        return self._coverage.counts(self.mean_prediction)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return self.bytes_with(len(self.entries))

    def bytes_with(self, num_clients: int) -> int:
        """Return the size of the bank with this many clients."""
        most = num_clients if self._most_entries is None else min(num_clients, self._most_entries)
        return self.total.nbytes + most * (self.total.numel() * self.keeping.dtype.itemsize + self._prior_bytes)

    @property
    def _prior_bytes(self) -> int:
        """The size of a client's prior, or 0 without a correction."""
        return 0 if self.priors is None else self.priors.entry_bytes

    def mean_age(self, version: int) -> float:
        """Return the mean age of the entries, in versions."""
        return version - self._heard_sum / len(self.heard_at) if self.heard_at else 0.0

    def to_tree(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "entries": self.entries.to_tree() if isinstance(self.entries, Entries) else self.entries,
            "heard_at": self.heard_at,
            "large": sorted(self._large),
            "num_refused": self.num_refused,
            "num_dropped": self.num_dropped,
            **({} if self.priors is None else {"priors": self.priors.to_tree()}),
        }

    def from_tree(self, tree: dict[str, Any]) -> "Bank":
        device = self.total.device
        self.total = tree["total"].to(device)
        if isinstance(self.entries, Entries):
            self.entries.from_tree(tree["entries"])
        else:
            self.entries = {client: entry.to(device) for client, entry in tree["entries"].items()}
        self.heard_at = OrderedDict(tree["heard_at"])
        self._heard_sum = sum(self.heard_at.values())
        self._large = set(tree["large"])
        self.num_refused, self.num_dropped = tree["num_refused"], tree["num_dropped"]
        if self.priors is not None:
            self.priors.from_tree(tree["priors"])
        self._coverage = ClassCoverage(self.total.shape[-1])
        for client in self.heard_at:
            self._coverage.changed(client)
        return self

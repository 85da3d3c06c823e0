"""The bank: the latest logits of every client on U, with a running mean whose cost does not grow with N."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedecho.distill.teachers import PriorCorrection, Priors, TeacherRule, robust_teacher
from fedecho.storage.client_memory import ClientMemory, Place, check_place

LARGEST_HALF = 65504.0


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How a bank keeps its entries; without a word, all of them in float32 beside the model.

    ``half``: float16, half the bytes; logits above 65,504 are refused. ``place``: beside the model, in main memory, or in a mapped
    temporary file in ``folder``, which is exact and as large as the disk. ``budget_mb``: the most that sum and entries together may
    take, wherever they lie; of clients that do not fit, those least recently heard are given up and no longer count in the mean.
    """

    half: bool = False
    place: Place | None = None
    folder: str | None = None
    budget_mb: float | None = None

    def __post_init__(self) -> None:
        check_place(self.place, self.folder, "distiller.bank_memory", "distiller.bank_dir")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32

    def most_entries(self, total: Tensor, bytes_beside: int = 0) -> int | None:
        """How many clients the budget holds, each with so many bytes beside its entry; None is any number."""
        if self.budget_mb is None:
            return None
        entry_bytes = total.numel() * self.dtype.itemsize + bytes_beside
        most = int((self.budget_mb * 1e6 - total.nbytes) // entry_bytes)
        if most < 1:
            least = (total.nbytes + entry_bytes) / 1e6
            raise ValueError(
                f"distiller.bank_budget_mb = {self.budget_mb:g} holds not one client: it must be at least {least:.3g}"
            )
        return most

    def entries(self, total: Tensor) -> "dict[int, Tensor] | Entries":
        """A plain dict where nothing was asked for: then the tensors that come in are the entries, without a copy."""
        if not self.half and self.place in (None, "device"):
            return {}
        return Entries(tuple(total.shape), total.device, self)


class Entries:
    """As much of a dict as a bank needs, over rows of a ``ClientMemory``."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, keeping: Keeping) -> None:
        self._shape = shape
        like = torch.empty(shape, device=device).reshape(-1)
        self._memory = ClientMemory(
            2**31 - 1, like, keeping.place or "device", keeping.folder, keeping.dtype, setting="distiller.bank_dir"
        )

    def __len__(self) -> int:
        return len(self._memory)

    def __iter__(self) -> Iterator[int]:
        return iter(self._memory)

    def __getitem__(self, client: int) -> Tensor:
        if client not in self._memory:
            raise KeyError(client)
        return self._memory[client].view(self._shape)

    def get(self, client: int) -> Tensor | None:
        return self[client] if client in self._memory else None

    def __setitem__(self, client: int, entry: Tensor) -> None:
        self._memory[client] = entry.reshape(-1)

    def __delitem__(self, client: int) -> None:
        del self._memory[client]

    def values(self) -> Iterator[Tensor]:
        return (self[client] for client in self._memory)

    def to_tree(self) -> dict[str, Any]:
        return self._memory.to_tree()

    def from_tree(self, tree: dict[str, Any]) -> "Entries":
        self._memory.from_tree(tree)
        return self


Average = Literal["logits", "probabilities"]


class Bank:
    """y^i of every client heard so far, and their sum.

    The sum is kept in float64: adding the new logits and subtracting the old ones then drifts by some 1e-16 a time, far below what
    float32 shows. Entries so large that taking them out again would leave nothing of the others are summed anew instead, and logits
    that are not finite are refused. Clients never heard are left out of the mean, not counted as zeros. A ``rule`` other than the
    mean looks at all entries at each version (distill/teachers.py). ``keeping`` bounds what the entries take: the sum is over what
    is kept, as it is kept, so that taking an entry out leaves nothing of it behind. With a ``correction`` what is kept are logits
    without the client's own prior (distill/teachers.py).
    """

    LARGE = 1e6

    def __init__(
        self,
        num_unlabeled: int,
        num_classes: int,
        device: torch.device,
        average: Average = "logits",
        rule: TeacherRule = "mean",
        trim: float = 0.2,
        keeping: Keeping | None = None,
        correction: PriorCorrection | None = None,
    ) -> None:
        if average not in ("logits", "probabilities"):
            raise ValueError(f"average must be 'logits' or 'probabilities', got {average!r}")
        self.average: Average = average
        self.rule: TeacherRule = rule
        self.trim = trim
        self.total = torch.zeros(num_unlabeled, num_classes, dtype=torch.float64, device=device)
        self.keeping = keeping or Keeping()
        self.entries = self.keeping.entries(self.total)
        self.heard_at: OrderedDict[int, int] = OrderedDict()
        """The version at which each was last heard; who has been silent longest comes first."""
        self.num_refused = self.num_dropped = 0
        corrects = correction is not None and correction.strength > 0
        self.priors = Priors(correction, num_classes, device) if correction is not None and corrects else None
        """None where logits are kept as they come."""
        self._most_entries = self.keeping.most_entries(self.total, self._prior_bytes)
        self._large: set[int] = set()
        self._heard_sum = 0

    def put(self, client: int, logits: Float[Tensor, "unlabeled classes"], version: int) -> None:
        """Line 5 of Algorithm 1: the client's newest predictions take the place of its older ones."""
        prior = None if self.priors is None else self.priors.correction.prior_of(logits)
        if self.priors is not None and prior is not None:
            logits = logits - self.priors.correction.evidence(prior)
        largest = float(logits.abs().max())
        too_large = self.keeping.half and self.average == "logits" and largest > LARGEST_HALF
        if too_large or not isfinite(largest):
            self.num_refused += 1  # the client's former logits stay
            return
        self._drop_for(client)
        entry = (logits.softmax(dim=-1) if self.average == "probabilities" else logits).to(self.keeping.dtype)
        old = self.entries.get(client)
        if client in self._large:
            self.entries[client] = entry
            self._large.discard(client)
            self._sum_anew()
        else:
            if old is not None:
                self.total.sub_(old)  # before it is overwritten: it may be a view
            self.entries[client] = entry
            self.total.add_(entry)
        if self.average == "logits" and largest > self.LARGE:
            self._large.add(client)
        if self.priors is not None and prior is not None:
            self.priors.put(client, prior)
        self._heard_sum += version - self.heard_at.get(client, 0)
        self.heard_at[client] = version
        self.heard_at.move_to_end(client)

    def _drop_for(self, client: int) -> None:
        """Where the budget is used up, who was heard least recently makes room for a client that is new."""
        if self._most_entries is None or client in self.heard_at or len(self.entries) < self._most_entries:
            return
        self._drop_oldest()
        self.num_dropped += 1

    def forget_before(self, version: int) -> None:
        """Clients last heard before that version are teachers no more, until they are heard again."""
        while self.heard_at and next(iter(self.heard_at.values())) < version:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped, heard = self.heard_at.popitem(last=False)
        self._heard_sum -= heard
        if self.priors is not None:
            self.priors.drop(dropped)
        if dropped in self._large:
            del self.entries[dropped]
            self._large.discard(dropped)
            self._sum_anew()
        else:
            self.total.sub_(self.entries[dropped])
            del self.entries[dropped]

    def _sum_anew(self) -> None:
        self.total.zero_()
        for entry in self.entries.values():
            self.total.add_(entry)

    def teacher(self) -> Float[Tensor, "unlabeled classes"]:
        """Line 14: the mean over the clients that have logits. A mean of probabilities comes back as its logarithm."""
        if not len(self.entries):
            raise ValueError("no client has been heard yet, so there is no teacher")
        mean = (self.total / len(self.entries)).float() if self.rule == "mean" else self._robust()
        if self.average == "probabilities":
            mean = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
        if self.priors is not None and self.priors.correction.shared:
            mean = mean + self.priors.given_back()
        return mean

    def _robust(self) -> Tensor:
        """In the order of the clients, so that sums round the same after a resume."""
        entries = (self.entries[client] for client in sorted(self.entries))
        return robust_teacher(entries, self.rule, self.trim, probabilities=self.average == "probabilities").float()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return self.bytes_with(len(self.entries))

    def bytes_with(self, num_clients: int) -> int:
        """Once so many clients have been heard."""
        most = num_clients if self._most_entries is None else min(num_clients, self._most_entries)
        return self.total.nbytes + most * (self.total.numel() * self.keeping.dtype.itemsize + self._prior_bytes)

    @property
    def _prior_bytes(self) -> int:
        """Of each client."""
        return 0 if self.priors is None else self.priors.entry_bytes

    def mean_age(self, version: int) -> float:
        """How old the teachers are on average, in versions."""
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
        self.num_refused, self.num_dropped = tree["num_refused"], tree.get("num_dropped", 0)
        if self.priors is not None:
            self.priors.from_tree(tree["priors"])
        return self

"""The bank of a language model: exact hidden states, top-k or full logits for every client and token."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedecho.core.task import Positions, is_exact
from fedecho.distill.bank import Average

Entry = tuple[Tensor, ...]


class Storage(Protocol):
    """The tensors of an entry have one row for each position."""

    @property
    def num_tokens(self) -> int:
        """The size of the vocabulary."""
        ...

    def entry(self, hidden: Float[Tensor, "positions width"], head: nn.Module) -> Entry:
        """What is kept of a client's answer."""
        ...

    def teacher(self, entries: Iterable[Entry]) -> Float[Tensor, "positions vocabulary"]:
        """The mean over clients, from the rows of their entries that belong to one mini-batch."""
        ...


@dataclass(frozen=True)
class FullLogits:
    """Every logit."""

    num_tokens: int
    dtype: torch.dtype = torch.float32
    average: Average = "logits"

    def entry(self, hidden: Tensor, head: nn.Module) -> Entry:
        return (_applied(head, hidden).to(self.dtype),)

    def teacher(self, entries: Iterable[Entry]) -> Tensor:
        if self.average == "logits":
            return _mean(map(_first, entries))
        return _log(_mean(map(_probabilities, entries)))


@dataclass(frozen=True)
class HiddenStates:
    """What the head sees; ``head`` is the one that all clients share."""

    head: nn.Linear
    dtype: torch.dtype = torch.float32

    @property
    def num_tokens(self) -> int:
        return self.head.out_features

    def entry(self, hidden: Tensor, head: nn.Module) -> Entry:
        return (hidden.to(self.dtype),)

    def teacher(self, entries: Iterable[Entry]) -> Tensor:
        mean = _mean(map(_first, entries))
        with torch.no_grad():
            # In float32 also where the head is kept in bf16, in which the two best tokens are often equal.
            return nn.functional.linear(mean, self.head.weight.float())


@dataclass(frozen=True)
class TopLogits:
    """The ``k`` largest logits, their tokens, and what each of the other tokens would have if they were all equal."""

    num_tokens: int
    k: int = 64
    dtype: torch.dtype = torch.float32
    average: Average = "logits"

    def entry(self, hidden: Tensor, head: nn.Module) -> Entry:
        return self.entry_of(_applied(head, hidden))

    def entry_of(self, logits: Float[Tensor, "positions vocabulary"]) -> Entry:
        values, tokens = logits.topk(self.k, dim=-1)
        # Taken out rather than subtracted: 1 - (sum of the kept) would lose what a certain prediction leaves for the rest.
        rest = logits.scatter(-1, tokens, float("-inf")).logsumexp(dim=-1, keepdim=True)
        even = rest - log(self.num_tokens - self.k)
        return values.to(self.dtype), tokens.to(torch.int32), even.float()

    def teacher(self, entries: Iterable[Entry]) -> Tensor:
        total, num = torch.zeros(()), 0
        for values, tokens, even in entries:
            total = total if num else torch.zeros(len(values), self.num_tokens, device=values.device)
            num += 1
            kept, others = values.float(), even
            if self.average == "probabilities":
                whole = torch.cat([kept, even + log(self.num_tokens - self.k)], dim=-1).logsumexp(dim=-1, keepdim=True)
                kept, others = (kept - whole).exp(), (even - whole).exp()
            total.add_(others)
            total.scatter_add_(-1, tokens.long(), kept - others)
        mean = total.div_(num)
        return mean if self.average == "logits" else _log(mean)


def storage_for(head: nn.Module, num_tokens: int, kind: str | None, k: int, half: bool, average: Average) -> Storage:
    """The storage that was asked for; unasked, the exact one where it is exact, else the largest logits."""
    dtype = torch.float16 if half else torch.float32
    can_be_exact = is_exact(head) and average == "logits"
    if kind is None:
        kind = "exact" if can_be_exact else "topk"
    if kind == "exact":
        if not can_be_exact:
            raise ValueError(
                "distiller.token_bank 'exact' needs a frozen output head without a bias and average 'logits' "
                "(LoRA leaves the head frozen; in full fine-tuning it is trained): use 'topk' or 'full'"
            )
        assert isinstance(head, nn.Linear)  # noqa: S101 (for the type checker)
        return HiddenStates(head, dtype)
    if kind == "full":
        return FullLogits(num_tokens, dtype, average)
    if k >= num_tokens:
        raise ValueError(f"distiller.top_k must be below the vocabulary of {num_tokens}, got {k}")
    return TopLogits(num_tokens, k, dtype, average)


def _applied(head: nn.Module, hidden: Tensor) -> Tensor:
    """Logits in float32, computed in the head's own precision."""
    logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
    return logits.float()


def _first(entry: Entry) -> Tensor:
    return entry[0]


def _probabilities(entry: Entry) -> Tensor:
    return entry[0].float().softmax(dim=-1)


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    """In float32, one client after the other: beside the sum of all there is never more than one of them.

    Give a ``map``: the loop of a generator would hold on to one client while the next is made.
    """
    rest = iter(tensors)
    total, num = next(rest).to(torch.float32, copy=True), 1
    while (tensor := next(rest, None)) is not None:
        total.add_(tensor)
        num += 1
        del tensor  # before the next one is made
    return total.div_(num)


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


class TokenTeacher:
    """``teacher[rows of U]`` is the mean over clients at those rows' positions, [positions, vocabulary]: all of it that ever is."""

    def __init__(self, storage: Storage, entries: list[Entry], positions: Positions) -> None:
        self._storage, self._entries, self._positions = storage, entries, positions

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """One client's rows at a time: those of all would be as many times [positions, vocabulary] where everything is kept."""
        at = self._positions.of(rows).to(self._entries[0][0].device)
        return self._storage.teacher(tuple(tensor[at] for tensor in entry) for entry in self._entries)


class TokenBank:
    """y^i of every client heard so far, as a ``Storage`` keeps it.

    No running sum as in ``Bank``: in float64 it would take as much as four clients in half precision, and the mean over the ten or
    so clients of a language task costs less than the student's own pass over the same mini-batch.
    """

    def __init__(self, storage: Storage, positions: Positions, device: torch.device) -> None:
        self.storage, self.positions, self.device = storage, positions, device
        self.entries: dict[int, Entry] = {}
        self.heard_at: dict[int, int] = {}
        self.num_refused = 0

    def put(self, client: int, entry: Entry, version: int) -> None:
        """Line 5 of Algorithm 1. What is not finite, also because half precision could not hold it, is refused."""
        if not all(bool(torch.isfinite(tensor).all()) for tensor in entry):
            self.num_refused += 1
            return
        self.entries[client] = entry
        self.heard_at[client] = version

    def forget_before(self, version: int) -> None:
        """Clients last heard before that version are teachers no more, until they are heard again."""
        for client in [client for client, heard in self.heard_at.items() if heard < version]:
            del self.entries[client], self.heard_at[client]

    def teacher(self) -> TokenTeacher:
        """Line 14."""
        if not self.entries:
            raise ValueError("no client has been heard yet, so there is no teacher")
        return TokenTeacher(self.storage, list(self.entries.values()), self.positions)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.entries.values() for tensor in entry)

    def bytes_with(self, num_clients: int) -> int:
        """Once so many clients have been heard; every entry is as large as the others."""
        return self.num_bytes // max(len(self), 1) * num_clients

    def mean_age(self, version: int) -> float:
        return version - sum(self.heard_at.values()) / len(self.heard_at) if self.heard_at else 0.0

    def to_tree(self) -> dict[str, Any]:
        entries = {client: list(entry) for client, entry in self.entries.items()}
        return {"entries": entries, "heard_at": self.heard_at, "num_refused": self.num_refused}

    def from_tree(self, tree: dict[str, Any]) -> "TokenBank":
        self.entries = {client: tuple(tensor.to(self.device) for tensor in entry) for client, entry in tree["entries"].items()}
        self.heard_at = dict(tree["heard_at"])
        self.num_refused = tree["num_refused"]
        return self

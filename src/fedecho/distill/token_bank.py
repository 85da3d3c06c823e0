"""The bank of a language model, which stores hidden states, the top-k logits or all logits of every client and token."""

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


class TokenStorage(Protocol):
    """What a bank stores of each client. The tensors of an entry have one row per position."""

    @property
    def num_tokens(self) -> int:
        """The size of the vocabulary."""
        ...

    def entry(self, hidden: Float[Tensor, "positions width"], head: nn.Module) -> Entry:
        """Return what to store of a client's hidden states."""
        ...

    def teacher(self, entries: Iterable[Entry]) -> Float[Tensor, "positions vocabulary"]:
        """Return the mean over clients for one mini-batch, given the matching rows of their entries."""
        ...


@dataclass(frozen=True)
class FullLogits:
    """Stores every logit."""

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
    """Stores the inputs of the head. ``head`` is shared by all clients."""

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
            # In float32 even for a bf16 head: in bf16 the two best tokens often tie.
            return nn.functional.linear(mean, self.head.weight.float())


@dataclass(frozen=True)
class TopLogits:
    """Stores the ``k`` largest logits, their tokens, and the logit of the other tokens as if those were all equal."""

    num_tokens: int
    k: int = 64
    dtype: torch.dtype = torch.float32
    average: Average = "logits"

    def entry(self, hidden: Tensor, head: nn.Module) -> Entry:
        return self.entry_of(_applied(head, hidden))

    def entry_of(self, logits: Float[Tensor, "positions vocabulary"]) -> Entry:
        values, tokens = logits.topk(self.k, dim=-1)
        # Not 1 - (sum of the top k): for a certain prediction, that would round the rest to 0.
        rest = logits.scatter(-1, tokens, float("-inf")).logsumexp(dim=-1, keepdim=True)
        even = rest - log(self.num_tokens - self.k)
        return values.to(self.dtype), tokens.to(torch.int32), even.float()

    def teacher(self, entries: Iterable[Entry]) -> Tensor:
        total, num = torch.zeros(()), 0
        for values, tokens, even in entries:
            total = total if num else torch.zeros(len(values), self.num_tokens, device=values.device)
            num += 1
            top, others = values.float(), even
            if self.average == "probabilities":
                norm = torch.cat([top, even + log(self.num_tokens - self.k)], dim=-1).logsumexp(dim=-1, keepdim=True)
                top, others = (top - norm).exp(), (even - norm).exp()
            total.add_(others)
            total.scatter_add_(-1, tokens.long(), top - others)
        mean = total.div_(num)
        return mean if self.average == "logits" else _log(mean)


def storage_for(head: nn.Module, num_tokens: int, kind: str | None, k: int, half: bool, average: Average) -> TokenStorage:
    """Return the storage of a ``kind``. None selects hidden states where they are exact, otherwise the top-k logits."""
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
    """Apply the head in its own precision and return the logits in float32."""
    logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
    return logits.float()


def _first(entry: Entry) -> Tensor:
    return entry[0]


def _probabilities(entry: Entry) -> Tensor:
    return entry[0].float().softmax(dim=-1)


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    """Average in float32, one client at a time, so that only one is in memory besides the sum.

    Pass a ``map``: the loop variable of a generator would keep one client alive while the next is computed.
    """
    rest = iter(tensors)
    total, num = next(rest).to(torch.float32, copy=True), 1
    while (tensor := next(rest, None)) is not None:
        total.add_(tensor)
        num += 1
        del tensor  # before the next one is computed
    return total.div_(num)


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


class TokenTeacher:
    """Computes the mean over clients on demand: ``teacher[rows of U]`` is [positions of those rows, vocabulary]."""

    def __init__(self, storage: TokenStorage, entries: list[Entry], positions: Positions) -> None:
        self._storage, self._entries, self._positions = storage, entries, positions

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """Average one client at a time: with full logits, each client's rows take [positions, vocabulary]."""
        at = self._positions.of(rows).to(self._entries[0][0].device)
        return self._storage.teacher(tuple(tensor[at] for tensor in entry) for entry in self._entries)


class TokenBank:
    """y^i of every client that has reported, in the form of a ``TokenStorage``.

    Unlike ``Bank`` it has no running sum. In float64 that would take as much memory as four clients in half precision, and the
    mean over the ten or so clients of a language task costs less than the student's own pass over the same mini-batch.
    """

    def __init__(self, storage: TokenStorage, positions: Positions, device: torch.device) -> None:
        self.storage, self.positions, self.device = storage, positions, device
        self.entries: dict[int, Entry] = {}
        self.heard_at: dict[int, int] = {}
        self.num_refused = 0

    def put(self, client: int, entry: Entry, version: int) -> None:
        """Line 5 of Algorithm 1: replace the client's entry. Entries that are not finite, or overflow float16, are rejected."""
        if not all(bool(torch.isfinite(tensor).all()) for tensor in entry):
            self.num_refused += 1
            return
        self.entries[client] = entry
        self.heard_at[client] = version

    def forget_before(self, version: int) -> None:
        """Drop the clients whose last report is from before ``version``."""
        for client in [client for client, reported in self.heard_at.items() if reported < version]:
            del self.entries[client], self.heard_at[client]

    def teacher(self) -> TokenTeacher:
        """Line 14: return the mean over the clients in the bank, computed for each mini-batch on demand."""
        if not self.entries:
            raise ValueError("there is no teacher: no client has reported yet")
        return TokenTeacher(self.storage, list(self.entries.values()), self.positions)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.entries.values() for tensor in entry)

    def bytes_with(self, num_clients: int) -> int:
        """Return the size of the bank with this many clients. All entries have the same size."""
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

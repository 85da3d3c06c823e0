"""What a server keeps of one client's predictions over a vocabulary, and how the mean over clients is made of it.

Three ways. ``FullLogits`` is the reference and takes [positions, vocabulary] a client. ``HiddenStates`` is exact where the head is
frozen and bias-free, because the head is linear: mean_i (W h_i) = W mean_i h_i. ``TopLogits`` keeps the k largest logits of a
position and the log-sum-exp of the rest, which is then spread evenly over the tokens that were not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedecho.core.tokens import is_exact
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

    def teacher(self, entries: Sequence[Entry]) -> Float[Tensor, "positions vocabulary"]:
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

    def teacher(self, entries: Sequence[Entry]) -> Tensor:
        if self.average == "logits":
            return _mean([logits for (logits,) in entries])
        return _log(_mean([logits.float().softmax(dim=-1) for (logits,) in entries]))


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

    def teacher(self, entries: Sequence[Entry]) -> Tensor:
        mean = _mean([hidden for (hidden,) in entries])
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

    def teacher(self, entries: Sequence[Entry]) -> Tensor:
        total = torch.zeros(len(entries[0][0]), self.num_tokens, device=entries[0][0].device)
        for values, tokens, even in entries:
            kept, others = values.float(), even
            if self.average == "probabilities":
                whole = torch.cat([kept, even + log(self.num_tokens - self.k)], dim=-1).logsumexp(dim=-1, keepdim=True)
                kept, others = (kept - whole).exp(), (even - whole).exp()
            total.add_(others)
            total.scatter_add_(-1, tokens.long(), kept - others)
        mean = total / len(entries)
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


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """In float32, one client after the other: the sum of all is the only large tensor."""
    total = tensors[0].float().clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.div_(len(tensors))


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()

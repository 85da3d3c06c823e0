"""Lines 12 to 16 of Algorithm 1: Q clipped steps that teach the student what the mean teacher predicts on U."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedecho.core.layout import BoundNetwork
from fedecho.core.randomness import global_rng, torch_rng
from fedecho.core.ranges import Decay, Epsilon, Factor, Range, at_least, check_ranges, positive, share
from fedecho.core.types import Weights
from fedecho.distill.bank import Average, Keeping
from fedecho.distill.loss import clip_factor, distillation_loss
from fedecho.distill.student import Student, Teacher
from fedecho.distill.teachers import PriorCorrection, TeacherRule
from fedecho.storage.client_memory import Place


@dataclass(frozen=True, slots=True)
class Adam:
    """The two moments and the number of steps they have seen. Owned."""

    first: Tensor
    second: Tensor
    num_steps: int = 0

    @classmethod
    def fresh(cls, params: Tensor) -> "Adam":
        return cls(torch.zeros_like(params), torch.zeros_like(params))


@dataclass(frozen=True, kw_only=True)
class Distiller:
    """The settings of server-side distillation; every ablation of the paper is a field.

    ``alpha_min == alpha_max`` fixes alpha; ``clip_norm = inf`` does not clip; ``average`` is over logits (the paper) or
    probabilities (its appendix); ``batch_norm = "frozen"`` keeps the student's statistics; ``moments = "fresh"`` restarts Adam
    at each version; ``num_distill_steps = None`` is one shuffled pass over U, 0 is no distillation. ``teacher`` is how all clients'
    logits become one: the paper's mean, a median, a mean without the outer ``trim`` on each side, or one weighted by certainty.
    Of clients last heard more than ``max_teacher_age`` versions ago none is a teacher: 0 leaves those of the current buffer.
    ``optimizer = "sgd"`` is line 15 as Algorithm 1 prints it, params - distill_lr * clipped gradient; the paper's runs use Adam.

    ``prior_correction`` divides each client's own label distribution, as its predictions on U show it, out of its logits
    (distill/teachers.py): 0 is the paper, 1 the full correction. ``prior_floor`` / C is the least share a class is taken to have.
    ``shared_prior`` is how much of the mean of all clients' priors the teacher is given back, for a U with skewed labels.

    What the bank of a language model keeps of each token: ``token_bank`` is "exact" (hidden states), "topk" (the ``top_k`` largest
    logits, 64 by default) or "full"; None is exact where the head is frozen and bias-free, else topk.

    ``half_bank`` keeps what either bank holds in float16. What else bounds the bank of a classifier (distill/bank.py): where its
    entries lie, ``bank_memory``, of which "file" is a mapped one in ``bank_dir``; and ``bank_budget_mb``, beyond which the clients
    least recently heard are given up.
    """

    distill_lr: Factor = 3e-6
    optimizer: Literal["adam", "sgd"] = "adam"
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Epsilon = 1e-8
    batch_size: Annotated[int, at_least(1)] = 50
    num_distill_steps: Annotated[int, at_least(0, most=10**5)] | None = None
    clip_norm: Annotated[float, positive(most=inf, note=" (inf for none)")] = 5.0
    alpha_min: Annotated[float, share()] = 0.2
    alpha_max: Annotated[float, share()] = 0.8
    average: Average = "logits"
    batch_norm: Literal["train", "frozen"] = "train"
    moments: Literal["carried", "fresh"] = "carried"
    teacher: TeacherRule = "mean"
    trim: Annotated[float, Range(0, 0.5, below=True, whole=True)] = 0.2
    max_teacher_age: Annotated[int, at_least(0, note=" (the current buffer's)")] | None = None
    prior_correction: Annotated[float, share()] = 0.0
    prior_floor: Annotated[float, share(above=True)] = 0.01
    shared_prior: Annotated[float, share()] = 0.0
    token_bank: Literal["exact", "topk", "full"] | None = None
    top_k: Annotated[int, at_least(1)] | None = None
    half_bank: bool | None = None
    bank_memory: Place | None = None
    bank_dir: str | None = None
    bank_budget_mb: Annotated[float, positive()] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "distiller.")
        if not 0 <= self.alpha_min <= self.alpha_max <= 1:
            raise ValueError(f"need 0 <= alpha_min <= alpha_max <= 1, got {self.alpha_min} and {self.alpha_max}")
        _ = self.keeping, self.correction  # say what is wrong with them

    @property
    def keeping(self) -> Keeping:
        return Keeping(half=bool(self.half_bank), place=self.bank_memory, folder=self.bank_dir, budget_mb=self.bank_budget_mb)

    @property
    def correction(self) -> PriorCorrection:
        return PriorCorrection(strength=self.prior_correction, floor=self.prior_floor, shared=self.shared_prior)

    def num_steps(self, num_unlabeled: int) -> int:
        """Q."""
        return -(-num_unlabeled // self.batch_size) if self.num_distill_steps is None else self.num_distill_steps

    def distill(
        self, student: Student, adam: Adam, weights: Weights, teacher: Teacher, seed: int
    ) -> tuple[Adam, Weights, dict[str, float]]:
        """Teach ``weights`` and give back new ones. Nothing is read off the device before the last step is under way."""
        if self.moments == "fresh":
            adam = Adam.fresh(weights.params)
        with global_rng(student.device, seed, "module"):
            adam, taught, seen = student.teach(self, adam, weights, teacher, self._batches(student, seed))
        return adam, taught, _metrics(seen)

    def gradient_of(self, network: BoundNetwork, logits: Tensor, teacher: Tensor) -> Tensor:
        """One batch's clipped gradient into ``network.grads``; what is worth recording comes back, still on the device."""
        parts = distillation_loss(logits, teacher, self.alpha_min, self.alpha_max)
        parts.loss.backward()
        norm = torch.linalg.vector_norm(network.grads)
        network.grads.mul_(clip_factor(norm, self.clip_norm))
        clipped = (norm > self.clip_norm).float()
        return torch.stack([parts.loss.detach(), parts.entropy, parts.soft_weight, norm, clipped])

    def step(self, adam: Adam, params: Tensor, grad: Tensor) -> Adam:
        """One step of the optimizer in place; plain SGD has no use for the moments."""
        count = adam.num_steps + 1
        if self.optimizer == "sgd":
            params.sub_(grad, alpha=self.distill_lr)
            return replace(adam, num_steps=count)
        adam.first.lerp_(grad, 1 - self.beta1)
        adam.second.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        scale = (adam.second / (1 - self.beta2**count)).sqrt_().add_(self.eps)
        params.addcdiv_(adam.first, scale, value=-self.distill_lr / (1 - self.beta1**count))
        return replace(adam, num_steps=count)

    def _batches(self, student: Student, seed: int) -> list[Tensor]:
        """Q mini-batches of U: shuffled passes, each row once a pass."""
        wanted, generator = self.num_steps(student.num_unlabeled), torch_rng(seed, "distill")
        batches: list[Tensor] = []
        while len(batches) < wanted:
            order = torch.randperm(student.num_unlabeled, generator=generator)
            batches += order.to(student.device).split(self.batch_size)
        return batches[:wanted]


def _metrics(seen: Tensor) -> dict[str, float]:
    if not len(seen):
        return {}
    loss, entropy, alpha, norm, clipped = seen.mean(dim=0).tolist()
    return {
        "distillation_loss": loss,
        "teacher_entropy": entropy,
        "soft_weight": alpha,
        "distill_grad_norm": norm,
        "clipped_share": clipped,
    }

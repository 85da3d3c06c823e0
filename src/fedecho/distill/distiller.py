"""Lines 12 to 16 of Algorithm 1: Q clipped steps that train the student to match the mean teacher on U."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedecho.core.layout import BoundNetwork
from fedecho.core.randomness import global_rng, torch_rng
from fedecho.core.ranges import Decay, Epsilon, Factor, Range, at_least, check_ranges, positive, share
from fedecho.core.types import Weights
from fedecho.distill.bank import Average
from fedecho.distill.bank_storage import BankStorage
from fedecho.distill.loss import clip_factor, distillation_loss
from fedecho.distill.student import Student, Teacher
from fedecho.distill.teachers import PriorCorrection, TeacherRule
from fedecho.storage.client_memory import MemoryPlace


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam's two moments and its number of steps. Owned."""

    first: Tensor
    second: Tensor
    num_steps: int = 0

    @classmethod
    def fresh(cls, params: Tensor) -> "Adam":
        return cls(torch.zeros_like(params), torch.zeros_like(params))


@dataclass(frozen=True, kw_only=True)
class Distiller:
    """The settings of server-side distillation. Every ablation of the paper is a field.

    * ``alpha_min == alpha_max`` fixes alpha, and ``clip_norm = inf`` disables clipping.
    * ``optimizer = "sgd"`` is line 15 as printed in Algorithm 1: params - distill_lr * clipped gradient. The paper's runs use Adam.
      ``moments = "fresh"`` restarts Adam at each version.
    * ``num_distill_steps = None`` is one shuffled pass over U; 0 disables distillation.
    * ``average`` is over logits (the paper) or probabilities (its appendix).
    * ``batch_norm = "frozen"`` keeps the student's statistics.
    * ``teacher`` combines all clients' logits: the paper's mean, a median, a mean without the outer share ``trim`` on each side
      ("trimmed"), or a mean weighted by certainty ("entropy").
    * ``max_teacher_age`` excludes clients whose last report is older, in versions. 0 leaves those of the current buffer.

    ``prior_correction`` divides each client's label distribution, estimated from its predictions on U, out of its logits
    (distill/teachers.py): 0 is the paper, 1 the full correction. ``prior_floor`` / C is the smallest share assumed for a class.
    ``shared_prior`` is the share of the clients' mean prior that is added back to the teacher, for a U with skewed labels.

    ``token_bank`` is what a language model's bank stores for each token: "exact" (hidden states), "topk" (the ``top_k`` largest
    logits, 64 by default) or "full". None means exact if the head is frozen and has no bias, otherwise topk.

    ``half_bank`` stores either bank in float16. The bank of a classifier (distill/bank.py) has two more settings: ``bank_memory``
    says where it is stored ("file" is a memory-mapped file in ``bank_dir``), and ``bank_budget_mb`` limits its size by dropping the
    least recently updated clients.
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
    trim: Annotated[float, Range(0, 0.5, below=True, both_ends=True)] = 0.2
    max_teacher_age: Annotated[int, at_least(0, note=" (the current buffer's)")] | None = None
    prior_correction: Annotated[float, share()] = 0.0
    prior_floor: Annotated[float, share(above=True)] = 0.01
    shared_prior: Annotated[float, share()] = 0.0
    token_bank: Literal["exact", "topk", "full"] | None = None
    top_k: Annotated[int, at_least(1)] | None = None
    half_bank: bool | None = None
    bank_memory: MemoryPlace | None = None
    bank_dir: str | None = None
    bank_budget_mb: Annotated[float, positive()] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "distiller.")
        if not 0 <= self.alpha_min <= self.alpha_max <= 1:
            raise ValueError(
                f"alpha_min and alpha_max must satisfy 0 <= alpha_min <= alpha_max <= 1, got {self.alpha_min} and {self.alpha_max}"
            )
        _ = self.keeping, self.correction  # their constructors validate them

    @property
    def keeping(self) -> BankStorage:
        return BankStorage(
            half=bool(self.half_bank), place=self.bank_memory, folder=self.bank_dir, budget_mb=self.bank_budget_mb
        )

    @property
    def correction(self) -> PriorCorrection:
        return PriorCorrection(strength=self.prior_correction, floor=self.prior_floor, shared=self.shared_prior)

    def num_steps(self, num_unlabeled: int) -> int:
        """Return Q for an unlabeled set of this size."""
        return -(-num_unlabeled // self.batch_size) if self.num_distill_steps is None else self.num_distill_steps

    def distill(
        self, student: Student, adam: Adam, weights: Weights, teacher: Teacher, seed: int
    ) -> tuple[Adam, Weights, dict[str, float]]:
        """Distil into a copy of ``weights`` and return it. Nothing is read from the device before the last step is launched."""
        if self.moments == "fresh":
            adam = Adam.fresh(weights.params)
        with global_rng(student.device, seed, "module"):
            adam, distilled, steps = student.teach(self, adam, weights, teacher, self._batches(student, seed))
        return adam, distilled, _metrics(steps)

    def gradient_of(self, network: BoundNetwork, logits: Tensor, teacher: Tensor) -> Tensor:
        """Compute a batch's clipped gradient into ``network.grads``. Return the step's metrics, still on the device."""
        parts = distillation_loss(logits, teacher, self.alpha_min, self.alpha_max)
        parts.loss.backward()
        norm = torch.linalg.vector_norm(network.grads)
        network.grads.mul_(clip_factor(norm, self.clip_norm))
        clipped = (norm > self.clip_norm).float()
        return torch.stack([parts.loss.detach(), parts.entropy, parts.soft_weight, norm, clipped])

    def step(self, adam: Adam, params: Tensor, grad: Tensor) -> Adam:
        """Take one optimizer step in place. SGD ignores the moments."""
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
        """Return Q mini-batches from shuffled passes over U."""
        num_steps, generator = self.num_steps(student.num_unlabeled), torch_rng(seed, "distill")
        batches: list[Tensor] = []
        while len(batches) < num_steps:
            order = torch.randperm(student.num_unlabeled, generator=generator)
            batches += order.to(student.device).split(self.batch_size)
        return batches[:num_steps]


def _metrics(steps: Tensor) -> dict[str, float]:
    """Average the metrics of ``gradient_of`` over the steps, [steps, 5]."""
    if not len(steps):
        return {}
    loss, entropy, alpha, norm, clipped = steps.mean(dim=0).tolist()
    return {
        "distillation_loss": loss,
        "teacher_entropy": entropy,
        "soft_weight": alpha,
        "distill_grad_norm": norm,
        "clipped_share": clipped,
    }

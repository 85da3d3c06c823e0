"""Metrics that say whether distillation does its work: recorded at each version, without any effect on the run.

Everything is computed on a fixed sample of U, in eval mode, from at most ``MOST_CLIENTS`` clients, so the cost of a version does
not grow with |U| or N. Coverage alone uses all of U, for the clients that have reported since the last version.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import log_softmax

from fedecho.core.types import Weights
from fedecho.distill.bank import Bank
from fedecho.distill.student import Student, Teacher
from fedecho.distill.token_bank import TokenBank

COVERAGE_OF_CLASS = "coverage_class_"
"""Prefix of the metrics of single classes. The record stores them as one list."""
MOST_CLIENTS = 64
"""The most clients whose predictions are compared with the teacher's at a version."""


def teacher_kl(student: Student, weights: Weights, teacher: Teacher) -> Float[Tensor, ""]:
    """Return the mean of KL(teacher || student) over the sample of U, for a model in eval mode."""
    total, num = torch.zeros((), device=student.device), 0
    for rows in student.sample:
        log_p = log_softmax(teacher[rows], dim=-1)
        log_q = log_softmax(student.predict(weights, rows), dim=-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
        num += len(log_p)
    return total / num


def relative_shift(start: Tensor, stepped: Tensor, distilled: Tensor) -> Float[Tensor, ""]:
    """Return |x_{t+1} - x_hat| / |x_hat - x_t|: how far distillation moved the model, relative to the buffer's own step."""
    moved: Tensor = torch.linalg.vector_norm(distilled - stepped) / torch.linalg.vector_norm(stepped - start)
    return moved


def agreement(bank: Bank, teacher: Tensor, rows: Tensor) -> Float[Tensor, " clients"]:
    """Return the share of the rows on which each client's best class is the teacher's.

    Of more than ``MOST_CLIENTS`` clients, an even sample is taken, from the oldest report to the newest.
    """
    every = -(-len(bank) // MOST_CLIENTS)
    best = teacher[rows].argmax(dim=-1)
    clients = islice(bank.heard_at, 0, None, every)
    return torch.stack([(bank.entries[client][rows].argmax(dim=-1) == best).float().mean() for client in clients])


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """What distillation did at one version. Agreement and coverage are None for a language model's bank.

    Its entries are hidden states or a few logits of each token, and a client's mean prediction over a vocabulary reflects how
    common tokens are, not the client's data.
    """

    shift: Float[Tensor, ""]
    kl_before: Float[Tensor, ""]
    kl_after: Float[Tensor, ""]
    agreement: Float[Tensor, " clients"] | None = None
    coverage: list[int] | None = None

    def as_metrics(self) -> dict[str, float]:
        """Return plain numbers by name."""
        shift, before, after = torch.stack([self.shift.float(), self.kl_before, self.kl_after]).tolist()
        metrics: dict[str, float] = {"distill_shift": shift, "teacher_kl_before": before, "teacher_kl_after": after}
        if self.agreement is not None:
            mean, lowest = torch.stack([self.agreement.mean(), self.agreement.min()]).tolist()
            metrics |= {"teacher_agreement": mean, "lowest_agreement": lowest}
        if self.coverage is not None:
            metrics["least_coverage"] = min(self.coverage)
            metrics |= {f"{COVERAGE_OF_CLASS}{label}": count for label, count in enumerate(self.coverage)}
        return metrics


def diagnose(
    student: Student,
    bank: Bank | TokenBank,
    teacher: Teacher,
    *,
    start: Weights,
    stepped: Weights,
    distilled: Weights,
    kl_before: Float[Tensor, ""],
) -> Diagnostics:
    """Compare x_t, x_hat and x_{t+1}. ``kl_before`` is the divergence of x_hat, measured before the bank or student changed."""
    shift = relative_shift(start.params, stepped.params, distilled.params)
    kl_after = teacher_kl(student, distilled, teacher)
    if not (isinstance(bank, Bank) and isinstance(teacher, Tensor)):
        return Diagnostics(shift, kl_before, kl_after)
    return Diagnostics(shift, kl_before, kl_after, agreement(bank, teacher, torch.cat(student.sample)), bank.coverage())

"""The uncertainty-aware distillation loss f_d (section 3.2 of the paper), as pure functions of logits."""

from math import log
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax


class DistillationLoss(NamedTuple):
    """The loss L with H and alpha, all still on the device."""

    loss: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    soft_weight: Float[Tensor, ""]


def normalized_entropy(teacher: Float[Tensor, "batch classes"]) -> Float[Tensor, ""]:
    """Return H: the mean entropy of the teacher's predictions divided by ln C, between 0 (certain) and 1 (uniform)."""
    log_p = log_softmax(teacher, dim=-1)
    per_row = -(log_p.exp() * log_p).sum(dim=-1)
    return (per_row.mean() / log(teacher.shape[-1])).clamp(0.0, 1.0)


def soft_weight(entropy: Float[Tensor, ""], alpha_min: float, alpha_max: float) -> Float[Tensor, ""]:
    """Return alpha = H alpha_max + (1 - H) alpha_min: the more uncertain the teacher, the more its soft labels count."""
    return entropy * alpha_max + (1 - entropy) * alpha_min


def distillation_loss(
    student: Float[Tensor, "batch classes"],
    teacher: Float[Tensor, "batch classes"],
    alpha_min: float = 0.2,
    alpha_max: float = 0.8,
) -> DistillationLoss:
    """Return f_d = alpha KL(softmax(teacher) || softmax(student)) + (1 - alpha) CE(student, argmax teacher), batch means.

    The teacher, H and alpha are constants without gradients.
    """
    teacher = teacher.detach()
    log_p, log_q = log_softmax(teacher, dim=-1), log_softmax(student, dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()
    ce = cross_entropy(student, teacher.argmax(dim=-1))
    entropy = normalized_entropy(teacher)
    alpha = soft_weight(entropy, alpha_min, alpha_max)
    return DistillationLoss(alpha * kl + (1 - alpha) * ce, entropy, alpha)


def clip_factor(norm: Float[Tensor, ""], clip_norm: float) -> Float[Tensor, ""]:
    """Return the factor that clips a gradient of this norm to ``clip_norm``, on the device."""
    return (clip_norm / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp(max=1.0)

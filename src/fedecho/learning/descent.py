"""One step of the optimizer on flat vectors, in place: the same lines for the eager and for the captured program."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from fedecho.learning.local import LocalTraining

Number = TypeVar("Number", float, Tensor)


def _gradient(local: LocalTraining, params: Tensor, grads: Tensor, start: Tensor | None, shift: Tensor | None) -> Tensor:
    """The raw gradient with the proximal term and the control variates' correction, in place."""
    if start is not None:
        grads.add_(params, alpha=local.proximal).sub_(start, alpha=local.proximal)
    return grads if shift is None else grads.add_(shift)


def sgd_step(local: LocalTraining, params: Tensor, grads: Tensor, start: Tensor | None, shift: Tensor | None) -> None:
    """y -= lr (g + wd y + prox (y - x_s) + c - c_i)."""
    grads = _gradient(local, params, grads, start, shift)
    if local.weight_decay:
        grads.add_(params, alpha=local.weight_decay)
    params.sub_(grads, alpha=local.client_lr)


def adamw_step(
    local: LocalTraining,
    params: Tensor,
    grads: Tensor,
    start: Tensor | None,
    shift: Tensor | None,
    first: Tensor,
    second: Tensor,
    root: Number,
    size: Number,
) -> None:
    """AdamW with decoupled weight decay; ``root`` and ``size`` are of ``bias_correction``."""
    in_gradient = local.corrected == "gradient"
    if shift is not None and not local.correct_unseen:
        shift = shift * (grads != 0)
    grads = _gradient(local, params, grads, start, shift if in_gradient else None)
    params.mul_(1 - local.client_lr * local.weight_decay)
    if shift is not None and not in_gradient:
        params.sub_(shift, alpha=local.client_lr)
    first.lerp_(grads, 1 - local.beta1)
    second.mul_(local.beta2).addcmul_(grads, grads, value=1 - local.beta2)
    scale = (second.sqrt() / root).add_(local.eps)
    if isinstance(size, Tensor):  # the same, where the number of steps is known to the device alone
        params.sub_((first * size).div_(scale))
    else:
        params.addcdiv_(first, scale, value=-size)


def bias_correction(local: LocalTraining, count: Number) -> tuple[Number, Number]:
    """(what the root of the second moment is divided by, the size of the step) of step number ``count``."""
    return (1 - local.beta2**count) ** 0.5, local.client_lr / (1 - local.beta1**count)


def rule_of(local: LocalTraining) -> Callable[..., None]:
    return sgd_step if local.optimizer == "sgd" else adamw_step


def wants_moments(local: LocalTraining) -> bool:
    return local.optimizer == "adamw"


def wants_raw_mean(local: LocalTraining) -> bool:
    """Where AdamW's gradient is corrected c_i' is the mean raw one; a mean step is known from how far the client came."""
    in_gradient = local.corrected == "gradient" and not local.correct_once
    return local.control_variates and local.optimizer == "adamw" and in_gradient

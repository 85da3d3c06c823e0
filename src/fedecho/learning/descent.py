"""In-place optimizer steps on flat vectors, shared by eager training and captured CUDA graphs."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from fedecho.learning.local import LocalTraining

Number = TypeVar("Number", float, Tensor)


def _gradient(local: LocalTraining, params: Tensor, grads: Tensor, start: Tensor | None, shift: Tensor | None) -> Tensor:
    """Add the proximal term and the control variates' correction to the raw gradient, in place."""
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
    """AdamW with decoupled weight decay. ``root`` and ``size`` come from ``bias_correction``."""
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
    if isinstance(size, Tensor):  # the same step when the step count is on the device only
        params.sub_((first * size).div_(scale))
    else:
        params.addcdiv_(first, scale, value=-size)


def bias_correction(local: LocalTraining, count: Number) -> tuple[Number, Number]:
    """Return the divisor of the second moment's root and the step size of step number ``count``."""
    return (1 - local.beta2**count) ** 0.5, local.client_lr / (1 - local.beta1**count)


def step_function(local: LocalTraining) -> Callable[..., None]:
    """Return the step function of the optimizer."""
    return sgd_step if local.optimizer == "sgd" else adamw_step


def wants_moments(local: LocalTraining) -> bool:
    return local.optimizer == "adamw"


def wants_raw_mean(local: LocalTraining) -> bool:
    """Report whether c_i' is the mean raw gradient, as it is when AdamW's gradient is corrected.

    In all other cases c_i' follows from the distance between the first and the last parameters.
    """
    in_gradient = local.corrected == "gradient" and not local.correct_once
    return local.control_variates and local.optimizer == "adamw" and in_gradient

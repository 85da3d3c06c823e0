"""GPU self-test: checks matrix products and our BatchNorm kernels before training starts."""

import os
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from fedecho.gpu import channel_ops

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
SHAPES = ((512, 768, 768), (512, 768, 3072))
"""(rows, inputs, outputs) of BERT-base layers at batch 8."""
MOST_AWAY = 0.02
"""Largest relative error of a product; bf16 rounding causes about 0.003."""


def wrong_products(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return what is wrong with matrix products on this device, or an empty string."""
    for rows, inputs, outputs in SHAPES:
        left = torch.linspace(-1.0, 1.0, rows * inputs).sin().view(rows, inputs).to(dtype)
        right = torch.linspace(-2.0, 3.0, inputs * outputs).cos().view(outputs, inputs).to(dtype)
        wanted = left.float() @ right.float().T
        error = (torch.nn.functional.linear(left.to(device), right.to(device)).float().cpu() - wanted).norm() / wanted.norm()
        if not error < MOST_AWAY:  # also true for NaN
            hint = f"; {SHARE} is {os.environ[SHARE]}, try unsetting it" if SHARE in os.environ else ""
            sizes = f"{rows} x {inputs} times {inputs} x {outputs} in {str(dtype).removeprefix('torch.')}"
            return f"a product of {sizes} is wrong (relative error {float(error):.2g}){hint}"
    return ""


Shape = tuple[int, int, int, int]
SUMS, MAPS = 1e-4, 1e-2
"""Largest errors, relative to the largest value, of sums (in float32) and of maps (rounded to bf16)."""


def check_kernels(device: torch.device, shapes: Iterable[Shape]) -> str:
    """Check the kernels and disable them in this process if any is wrong; return the reason, or an empty string.

    ``shapes`` are the input shapes of the network's BatchNorms (``norm_shapes``), so this compiles what training needs.
    """
    if channel_ops.KERNELS and channel_ops.HAS_TRITON:
        for shape in sorted(shapes):
            channel_ops.FAULT = channel_ops.FAULT or fault(device, shape)
    return channel_ops.FAULT


def norm_shapes(module: nn.Module, images: Tensor, nums: Iterable[int]) -> set[Shape]:
    """Return the input shapes of the module's BatchNorms for batches of ``nums`` images like these."""
    shapes: set[tuple[int, int, int]] = set()

    def record(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes.add((inputs[0].shape[1], inputs[0].shape[2], inputs[0].shape[3]))

    hooks = [norm.register_forward_pre_hook(record) for norm in module.modules() if isinstance(norm, nn.BatchNorm2d)]
    was_training = module.training
    try:
        with torch.no_grad():
            module.eval()(images)
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    return {(num, *shape) for num in nums for shape in shapes}


@cache
def fault(device: torch.device, shape: Shape) -> str:
    """Return what is wrong with the kernels on this shape, or an empty string."""
    try:
        for name, ours, expected, tolerance in _comparisons(device, shape):
            off = float((ours.float() - expected).abs().max() / expected.abs().max())
            if not off <= tolerance:
                return f"{name} over {shape[1]} channels differs from torch's by {off:.2g} of the largest value"
    except torch.OutOfMemoryError:
        raise  # not the kernels' fault
    except Exception as error:  # whatever Triton, the compiler behind it or the driver may raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return ""


def _comparisons(device: torch.device, shape: Shape) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield (name, our bf16 result, torch's float32 result on the same numbers, tolerance)."""
    rng, (num, channels, *_) = torch.Generator(device).manual_seed(0), shape
    empty = torch.empty(shape, dtype=torch.bfloat16, device=device).contiguous(memory_format=torch.channels_last)
    low = [torch.empty_like(empty).normal_(generator=rng) for _ in range(3)]
    (x, grad, extra), (x_high, grad_high, extra_high) = low, [each.float() for each in low]
    share = torch.rand(num, generator=rng, device=device)
    # Rounded to bf16 so that scale x + shift rounds the same fused or not: near 0, both must agree whether the ReLU is active.
    scale, shift, d_mean, d_variance = torch.randn(4, channels, generator=rng, device=device).bfloat16().float()
    for ours, expected in zip(channel_ops.sums(x, share), channel_ops.sums(x_high, share), strict=True):
        yield "a sum", ours, expected, SUMS
    for rectify in (False, True):
        both = (channel_ops.gradient_sums(a, b, scale, shift, rectify) for a, b in ((grad, x), (grad_high, x_high)))
        for ours, expected in zip(*both, strict=True):
            yield "a sum of gradients", ours, expected, SUMS
        for more, more_high in ((None, None), (extra, extra_high)):
            one, two = (channel_ops.normalised(a, scale, shift, b, rectify) for a, b in ((x, more), (x_high, more_high)))
            yield "a normalisation", one, two, MAPS
        vectors = (scale, shift, share, d_mean, d_variance, rectify)
        one, two = (channel_ops.input_gradient(a, b, *vectors) for a, b in ((grad, x), (grad_high, x_high)))
        yield "a gradient", one, two, MAPS
    x[0, 0, 0, 0] = torch.nan  # NaN must propagate, or a diverging model would look sound
    lost = channel_ops.normalised(x, scale, shift, None, True).isnan()
    yield "a normalisation of NaN", lost, x.isnan().float(), 0.0

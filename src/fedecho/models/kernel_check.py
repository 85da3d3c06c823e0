"""Are BatchNorm's own kernels right on this GPU, with this Triton? Asked before anything is compiled with them."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from fedecho.models import channel_ops

LAYERS = ((64, 32), (128, 16), (256, 8), (512, 4))
"""(channels, side) of ResNet-18 on CIFAR, so that what is compiled here is what training needs."""


@cache
def without_kernels(device: torch.device, num: int) -> str:
    """Why torch's own operations take the kernels' place from now on; empty, and the kernels stay, if all is well.

    ``num`` is the number of images in a batch.
    """
    cause = _fault(device, num) if channel_ops.KERNELS and channel_ops.HAS_TRITON else ""
    if cause:
        channel_ops.KERNELS.clear()
    return cause


def _fault(device: torch.device, num: int) -> str:
    try:
        for channels, side in LAYERS:
            for name, ours, expected, tolerance in _answers(device, num, channels, side):
                off = float((ours.float() - expected).abs().max() / expected.abs().max())
                if not off <= tolerance:
                    return f"{name} over {channels} channels differs from torch's by {off:.2g}, relative to the largest value"
    except Exception as error:  # whatever Triton, the compiler behind it or the driver may raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return ""


def _answers(device: torch.device, num: int, channels: int, side: int) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """(what, ours in bf16, torch's in float32 of the same numbers, how far apart they may be)."""
    rng = torch.Generator(device).manual_seed(0)
    shape = (num, channels, side, side)
    lasting = {"device": device, "memory_format": torch.channels_last}
    low = [torch.empty(shape, dtype=torch.bfloat16, **lasting).normal_(generator=rng) for _ in range(3)]  # type: ignore[call-overload]
    high = [each.float() for each in low]
    share = torch.rand(num, generator=rng, device=device)
    # Rounded, so that scale x + shift is rounded once, fused or not: where it is near 0, both then see a ReLU open or closed.
    scale, shift, d_mean, d_variance = torch.randn(4, channels, generator=rng, device=device).bfloat16().float()
    sums, maps = 1e-3, 1e-2
    for ours, expected in zip(channel_ops.sums(low[0], share), channel_ops.sums(high[0], share), strict=True):
        yield "a sum", ours, expected, sums
    for rectify in (False, True):
        (x, grad, extra), (x_high, grad_high, extra_high) = low, high
        both = (channel_ops.gradient_sums(a, b, scale, shift, rectify) for a, b in ((grad, x), (grad_high, x_high)))
        for ours, expected in zip(*both, strict=True):
            yield "a sum of gradients", ours, expected, sums
        for more, more_high in ((None, None), (extra, extra_high)):
            one, two = (channel_ops.normalised(a, scale, shift, b, rectify) for a, b in ((x, more), (x_high, more_high)))
            yield "a normalisation", one, two, maps
        vectors = (scale, shift, share, d_mean, d_variance, rectify)
        one, two = (channel_ops.input_gradient(a, b, *vectors) for a, b in ((grad, x), (grad_high, x_high)))
        yield "a gradient", one, two, maps

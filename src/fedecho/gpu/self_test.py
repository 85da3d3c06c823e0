"""Does this GPU compute correctly? Matrix products and our BatchNorm kernels are checked before anything is trained."""

import os
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from fedecho.gpu import channel_ops

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
SHAPES = ((512, 768, 768), (512, 768, 3072))
"""Of BERT-base, batch 8: rows, and a layer's inputs and outputs."""
MOST_AWAY = 0.02
"""Of the product's norm: what bf16 rounds off is some .003."""


def wrong_products(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """What is wrong with products on this device, in a line, or nothing."""
    for rows, into, out in SHAPES:
        left = torch.linspace(-1.0, 1.0, rows * into).sin().view(rows, into).to(dtype)
        right = torch.linspace(-2.0, 3.0, into * out).cos().view(out, into).to(dtype)
        wanted = left.float() @ right.float().T
        away = (torch.nn.functional.linear(left.to(device), right.to(device)).float().cpu() - wanted).norm() / wanted.norm()
        if not away < MOST_AWAY:  # NaN is not
            share = f"; {SHARE} is {os.environ[SHARE]}, try it without" if SHARE in os.environ else ""
            what = f"{rows} x {into} times {into} x {out} in {str(dtype).removeprefix('torch.')}"
            return f"a product of {what} came out wrong on it (off by {float(away):.2g}){share}"
    return ""


Shape = tuple[int, int, int, int]
SUMS, MAPS = 1e-4, 1e-2
"""How far sums, in float32, and maps, rounded to bf16, may be from torch's, relative to the largest value."""


def without_kernels(device: torch.device, shapes: Iterable[Shape]) -> str:
    """Why torch's own operations take the kernels' place in this process, from now on; empty if they need not.

    ``shapes`` are those of what the network's BatchNorms are given (``norm_shapes``): what is compiled here is what training needs.
    """
    if channel_ops.KERNELS and channel_ops.HAS_TRITON:
        for shape in sorted(shapes):
            channel_ops.FAULT = channel_ops.FAULT or fault(device, shape)
    return channel_ops.FAULT


def norm_shapes(module: nn.Module, images: Tensor, nums: Iterable[int]) -> set[Shape]:
    """For batches of so many images like these."""
    seen: set[tuple[int, int, int]] = set()

    def see(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.add((given[0].shape[1], given[0].shape[2], given[0].shape[3]))

    hooks = [norm.register_forward_pre_hook(see) for norm in module.modules() if isinstance(norm, nn.BatchNorm2d)]
    was_training = module.training
    try:
        with torch.no_grad():
            module.eval()(images)
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    return {(num, *one) for num in nums for one in seen}


@cache
def fault(device: torch.device, shape: Shape) -> str:
    """What is wrong with the kernels on this shape; empty if nothing is."""
    try:
        for name, ours, expected, tolerance in _answers(device, shape):
            off = float((ours.float() - expected).abs().max() / expected.abs().max())
            if not off <= tolerance:
                return f"{name} over {shape[1]} channels differs from torch's by {off:.2g}, relative to the largest value"
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernels
    except Exception as error:  # whatever Triton, the compiler behind it or the driver may raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return ""


def _answers(device: torch.device, shape: Shape) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """(what, ours in bf16, torch's in float32 of the same numbers, how far apart they may be)."""
    rng, (num, channels, *_) = torch.Generator(device).manual_seed(0), shape
    empty = torch.empty(shape, dtype=torch.bfloat16, device=device).contiguous(memory_format=torch.channels_last)
    low = [torch.empty_like(empty).normal_(generator=rng) for _ in range(3)]
    (x, grad, extra), (x_high, grad_high, extra_high) = low, [each.float() for each in low]
    share = torch.rand(num, generator=rng, device=device)
    # Rounded, so that scale x + shift is rounded once, fused or not: where it is near 0, both then see a ReLU open or closed.
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
    x[0, 0, 0, 0] = torch.nan  # a diverging model must not look like a sound one
    lost = channel_ops.normalised(x, scale, shift, None, True).isnan()
    yield "a normalisation of NaN", lost, x.isnan().float(), 0.0

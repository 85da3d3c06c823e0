"""Sums over all pixels of every channel: by torch, or where ``use_kernels`` says so by kernels of our own (``channel_kernels``)."""

from importlib.util import find_spec

import torch
from torch import Tensor

use_kernels = False
"""Off until a GPU has shown what they bring: they are right in Triton's interpreter, and nobody has timed them."""
HAS_TRITON = find_spec("triton") is not None
PIXELS = (0, 2, 3)
"""All that a channel's sums are over."""
MOST_VALUES = 2**31
"""The kernels count in 32 bits."""


def sums(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of share x and of share x^2, in float32; ``share`` is one number an image."""
    if use_kernels and HAS_TRITON and suits_kernels(x) and len(share) == len(x):
        from fedecho.models.channel_kernels import channel_sums

        first, second = channel_sums(x, share)
        return first.sum(dim=0), second.sum(dim=0)
    wide, by_row = x.float(), share[:, None, None, None]
    return (wide * by_row).sum(dim=PIXELS), (wide * wide * by_row).sum(dim=PIXELS)


def gradient_sums(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool) -> tuple[Tensor, Tensor]:
    """Sums of grad and of grad x, of the pixels that a ReLU behind scale x + shift lets through (or of all)."""
    if use_kernels and HAS_TRITON and suits_kernels(x):
        from fedecho.models.channel_kernels import channel_gradient_sums

        first, second = channel_gradient_sums(grad, x, scale, shift, rectify)
        return first.sum(dim=0), second.sum(dim=0)
    wide, high = x.float(), grad.float()
    if rectify:
        high = torch.where(wide * by_channel(scale) + by_channel(shift) > 0, high, 0.0)
    return high.sum(dim=PIXELS), (high * wide).sum(dim=PIXELS)


def suits_kernels(x: Tensor) -> bool:
    """In float32 a run is compared with others, so it adds as torch does."""
    channels = x.shape[1]
    in_bf16_on_gpu = x.is_cuda and x.dtype == torch.bfloat16 and x.numel() < MOST_VALUES
    return in_bf16_on_gpu and 8 <= channels <= 2048 and channels & (channels - 1) == 0


def by_channel(vector: Tensor) -> Tensor:
    return vector[:, None, None]

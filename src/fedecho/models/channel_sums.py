"""Sums over all pixels of every channel: by kernels of our own where a GPU computes in low precision, else by torch."""

from types import ModuleType

import torch
from torch import Tensor

kernels: ModuleType | None
try:
    from fedecho.models import channel_kernels as kernels
except ImportError:  # a torch without Triton
    kernels = None

use_kernels = False
"""Off until a GPU has shown what they bring: they are tested, but not yet measured."""
PIXELS = (0, 2, 3)
"""All that a channel's sums are over."""


def sums(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of share x and of share x^2, in float32; ``share`` is one number an image."""
    if use_kernels and kernels is not None and suits_kernels(x):
        first, second = kernels.channel_sums(x, share)
        return first.sum(dim=0), second.sum(dim=0)
    wide, by_row = x.float(), share[:, None, None, None]
    return (wide * by_row).sum(dim=PIXELS), (wide * wide * by_row).sum(dim=PIXELS)


def gradient_sums(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool) -> tuple[Tensor, Tensor]:
    """Sums of grad and of grad x, of the pixels that a ReLU behind scale x + shift lets through (or of all)."""
    if use_kernels and kernels is not None and suits_kernels(x):
        first, second = kernels.channel_gradient_sums(grad, x, scale, shift, rectify)
        return first.sum(dim=0), second.sum(dim=0)
    wide, high = x.float(), grad.float()
    if rectify:
        high = torch.where(wide * by_channel(scale) + by_channel(shift) > 0, high, 0.0)
    return high.sum(dim=PIXELS), (high * wide).sum(dim=PIXELS)


def suits_kernels(x: Tensor) -> bool:
    """In float32 a run is compared with others, so it adds as torch does."""
    channels = x.shape[1]
    return x.is_cuda and x.dtype == torch.bfloat16 and 8 <= channels <= 2048 and channels & (channels - 1) == 0


def by_channel(vector: Tensor) -> Tensor:
    return vector[:, None, None]

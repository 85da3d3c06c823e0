"""What BatchNorm does with a channel's pixels: sums over all of them, and maps of each.

By torch, or by kernels of our own (``channel_kernels``) where ``KERNELS`` names them.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

KERNELS: dict[str, int] = {"sums": 8, "maps": 128}
"""Of "sums" and "maps": the least number of channels for which each is used."""
FAULT = ""
"""Why none of them is used in this process (``kernel_check`` found it); empty while they are."""
HAS_TRITON = find_spec("triton") is not None
TILE = 2048
"""Values that a block of threads reads at once."""
LEAST_TILES, MOST_BLOCKS = 2, 132
"""A Hopper card has 132 processors: about a block for each."""
PIXELS = (0, 2, 3)
"""All that a channel's sums are over."""
MOST_VALUES = 2**31
"""The kernels count in 32 bits."""


def sums(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of share x and of share x^2, in float32; ``share`` is one number an image."""
    if _by_kernel("sums", x):
        from fedecho.gpu.channel_kernels import channel_sums

        first, second = channel_sums(x, share, *cut(x))
        return first.sum(dim=0), second.sum(dim=0)
    wide, by_row = x.float(), share[:, None, None, None]
    return (wide * by_row).sum(dim=PIXELS), (wide * wide * by_row).sum(dim=PIXELS)


def gradient_sums(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool) -> tuple[Tensor, Tensor]:
    """Sums of grad and of grad x, of the pixels that a ReLU behind scale x + shift lets through (or of all)."""
    if _by_kernel("sums", x):
        from fedecho.gpu.channel_kernels import channel_gradient_sums

        first, second = channel_gradient_sums(grad, x, scale, shift, rectify, *cut(x))
        return first.sum(dim=0), second.sum(dim=0)
    high = _let_through(grad, x, scale, shift, rectify).float()
    return high.sum(dim=PIXELS), (high * x.float()).sum(dim=PIXELS)


def normalised(x: Tensor, scale: Tensor, shift: Tensor, extra: Tensor | None, rectify: bool) -> Tensor:
    """scale x + shift, or relu of it, or relu of it and ``extra``; computed in float32, kept as x is."""
    if _by_kernel("maps", x):
        from fedecho.gpu.channel_kernels import channel_normalised

        mapped: Tensor = channel_normalised(x, scale, shift, extra, rectify)
        # A network in torch's own memory format may ask for a view of it.
        return mapped if x.is_contiguous(memory_format=torch.channels_last) else mapped.contiguous()
    y = x.float() * _by_channel(scale) + _by_channel(shift)
    if extra is not None:
        y = y + extra
    return (y.clamp_min(0.0) if rectify else y).to(x.dtype)


def input_gradient(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, share: Tensor, d_mean: Tensor, d_variance: Tensor, rectify: bool
) -> Tensor:
    """grad scale + share (d_mean + 2 x d_variance), with the grad that a ReLU behind scale x + shift lets through (or all)."""
    if _by_kernel("maps", x):
        from fedecho.gpu.channel_kernels import channel_input_gradient

        d_x: Tensor = channel_input_gradient(grad, x, scale, shift, share, d_mean, d_variance, rectify)
        return d_x
    high = _let_through(grad, x, scale, shift, rectify).float()
    through = share[:, None, None, None] * (_by_channel(d_mean) + 2.0 * x.float() * _by_channel(d_variance))
    return (high * _by_channel(scale) + through).to(x.dtype)


def _let_through(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool) -> Tensor:
    is_open = x.float() * _by_channel(scale) + _by_channel(shift) > 0 if rectify else None
    return grad if is_open is None else torch.where(is_open, grad, 0.0)


class Cut(NamedTuple):
    """How the rows of pixels are shared out: each of ``blocks`` takes ``tiles`` of ``rows``."""

    blocks: int
    tiles: int
    rows: int


def cut(x: Tensor) -> Cut:
    """
    >>> cut(torch.empty(50, 64, 32, 32, device="meta"))
    Cut(blocks=124, tiles=13, rows=32)
    """
    rows = max(1, TILE // x.shape[1])
    num_tiles = -(-x.shape[0] * x.shape[2] * x.shape[3] // rows)
    tiles = max(LEAST_TILES, -(-num_tiles // MOST_BLOCKS))
    return Cut(-(-num_tiles // tiles), tiles, rows)


def _by_kernel(which: str, x: Tensor) -> bool:
    return not FAULT and which in KERNELS and KERNELS[which] <= x.shape[1] and HAS_TRITON and suits_kernels(x)


def suits_kernels(x: Tensor) -> bool:
    """In float32 a run is compared with others, so it computes as torch does."""
    channels = x.shape[1]
    in_bf16_on_gpu = x.is_cuda and x.dtype == torch.bfloat16 and x.numel() < MOST_VALUES
    return in_bf16_on_gpu and 8 <= channels <= 2048 and channels & (channels - 1) == 0


def _by_channel(vector: Tensor) -> Tensor:
    return vector[:, None, None]

"""BatchNorm's per-channel operations: sums over all pixels and elementwise maps.

Computed by torch, or by our Triton kernels (``channel_kernels``) where ``KERNELS`` enables them.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

KERNELS: dict[str, int] = {"sums": 8, "maps": 128}
"""Smallest number of channels for which each kernel ("sums", "maps") is used."""
FAULT = ""
"""Why the kernels are disabled in this process, as found by ``self_test``; empty if they are enabled."""
HAS_TRITON = find_spec("triton") is not None
TILE = 2048
"""Values that a block of threads reads at once."""
LEAST_TILES, MOST_BLOCKS = 2, 132
"""About one block for each of a Hopper GPU's 132 multiprocessors."""
PIXELS = (0, 2, 3)
"""Dimensions that a channel's sums reduce."""
MOST_VALUES = 2**31
"""The kernels use 32-bit indices."""


def sums(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of share x and of share x^2 in float32; ``share`` has one entry per image."""
    if _by_kernel("sums", x):
        from fedecho.gpu.channel_kernels import channel_sums

        first, second = channel_sums(x, share, *cut(x))
        return first.sum(dim=0), second.sum(dim=0)
    wide, by_row = x.float(), share[:, None, None, None]
    return (wide * by_row).sum(dim=PIXELS), (wide * wide * by_row).sum(dim=PIXELS)


def gradient_sums(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of grad and of grad x over the pixels where relu(scale x + shift) is active (or over all)."""
    if _by_kernel("sums", x):
        from fedecho.gpu.channel_kernels import channel_gradient_sums

        first, second = channel_gradient_sums(grad, x, scale, shift, rectify, *cut(x))
        return first.sum(dim=0), second.sum(dim=0)
    high = _relu_masked(grad, x, scale, shift, rectify).float()
    return high.sum(dim=PIXELS), (high * x.float()).sum(dim=PIXELS)


def normalised(x: Tensor, scale: Tensor, shift: Tensor, extra: Tensor | None, rectify: bool) -> Tensor:
    """Return scale x + shift, its relu, or the relu of its sum with ``extra``; computed in float32, stored in x's dtype."""
    if _by_kernel("maps", x):
        from fedecho.gpu.channel_kernels import channel_normalised

        mapped: Tensor = channel_normalised(x, scale, shift, extra, rectify)
        # A network in torch's default memory format may take a view of the result.
        return mapped if x.is_contiguous(memory_format=torch.channels_last) else mapped.contiguous()
    y = x.float() * _by_channel(scale) + _by_channel(shift)
    if extra is not None:
        y = y + extra
    return (y.clamp_min(0.0) if rectify else y).to(x.dtype)


def input_gradient(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, share: Tensor, d_mean: Tensor, d_variance: Tensor, rectify: bool
) -> Tensor:
    """Return grad scale + share (d_mean + 2 x d_variance), with grad masked by relu(scale x + shift) if ``rectify``."""
    if _by_kernel("maps", x):
        from fedecho.gpu.channel_kernels import channel_input_gradient

        d_x: Tensor = channel_input_gradient(grad, x, scale, shift, share, d_mean, d_variance, rectify)
        return d_x
    high = _relu_masked(grad, x, scale, shift, rectify).float()
    through = share[:, None, None, None] * (_by_channel(d_mean) + 2.0 * x.float() * _by_channel(d_variance))
    return (high * _by_channel(scale) + through).to(x.dtype)


def _relu_masked(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool) -> Tensor:
    is_open = x.float() * _by_channel(scale) + _by_channel(shift) > 0 if rectify else None
    return grad if is_open is None else torch.where(is_open, grad, 0.0)


class Cut(NamedTuple):
    """Split of the pixel rows: each of ``blocks`` processes ``tiles`` tiles of ``rows`` rows."""

    blocks: int
    tiles: int
    rows: int


def cut(x: Tensor) -> Cut:
    """Split the pixel rows of ``x`` over blocks.

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
    """Whether the kernels can process ``x``. Float32 runs use torch, so that they can be compared with other software."""
    channels = x.shape[1]
    in_bf16_on_gpu = x.is_cuda and x.dtype == torch.bfloat16 and x.numel() < MOST_VALUES
    return in_bf16_on_gpu and 8 <= channels <= 2048 and channels & (channels - 1) == 0


def _by_channel(vector: Tensor) -> Tensor:
    return vector[:, None, None]

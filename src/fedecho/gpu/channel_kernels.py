"""Triton kernels for BatchNorm's sums and elementwise maps. Pixels are rows of channels, as in channels-last memory.

Each block of threads reduces many rows to its own partial sums, so the order of summation is always the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedecho.gpu.channel_ops import TILE

WARPS = 4
"""128 threads; each loads 16 bytes twice per tile."""


@triton.jit
def _sums(x, share, first, second, num_rows, IMAGE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr):
    """Sums of share x and of share x^2 over this block's rows; each image has IMAGE rows."""
    channels = tl.arange(0, C)
    one = tl.zeros([ROWS, C], tl.float32)
    two = tl.zeros([ROWS, C], tl.float32)
    for tile in tl.range(0, TILES, loop_unroll_factor=4):
        rows = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = rows < num_rows
        values = tl.load(x + rows[:, None] * C + channels[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        weighed = values * tl.load(share + rows // IMAGE, mask=inside, other=0.0)[:, None]
        one += weighed
        two += weighed * values
    tl.store(first + tl.program_id(0) * C + channels, tl.sum(one, 0))
    tl.store(second + tl.program_id(0) * C + channels, tl.sum(two, 0))


@triton.jit
def _gradient_sums(
    grad,
    x,
    scale,
    shift,
    first,
    second,
    num_rows,
    RECTIFY: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """Sums of grad and of grad x over this block's rows; with RECTIFY only where scale x + shift is above 0."""
    channels = tl.arange(0, C)
    one = tl.zeros([ROWS, C], tl.float32)
    two = tl.zeros([ROWS, C], tl.float32)
    slope = tl.load(scale + channels)[None, :]
    offset = tl.load(shift + channels)[None, :]
    for tile in tl.range(0, TILES, loop_unroll_factor=4):
        rows = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        places = rows[:, None] * C + channels[None, :]
        inside = rows[:, None] < num_rows
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
        if RECTIFY:
            upstream = tl.where(values * slope + offset > 0, upstream, 0.0)
        one += upstream
        two += upstream * values
    tl.store(first + tl.program_id(0) * C + channels, tl.sum(one, 0))
    tl.store(second + tl.program_id(0) * C + channels, tl.sum(two, 0))


@triton.jit
def _normalised(
    x, scale, shift, extra, y, num_rows, EXTRA: tl.constexpr, RECTIFY: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr
):
    """scale x + shift (+ extra), rectified or not."""
    channels = tl.arange(0, C)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * C + channels[None, :]
    inside = rows[:, None] < num_rows
    slope = tl.load(scale + channels)[None, :]
    offset = tl.load(shift + channels)[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) * slope + offset
    if EXTRA:
        values += tl.load(extra + places, mask=inside, other=0.0).to(tl.float32)
    if RECTIFY:
        values = tl.where(values < 0, 0.0, values)  # NaN stays NaN, which a maximum would make 0
    tl.store(y + places, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _input_gradient(
    grad,
    x,
    scale,
    shift,
    share,
    d_mean,
    d_variance,
    d_x,
    num_rows,
    RECTIFY: tl.constexpr,
    IMAGE: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """grad scale + share (d_mean + 2 x d_variance); with RECTIFY the grad counts only where scale x + shift is above 0."""
    channels = tl.arange(0, C)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * C + channels[None, :]
    inside = rows < num_rows
    slope = tl.load(scale + channels)[None, :]
    values = tl.load(x + places, mask=inside[:, None], other=0.0).to(tl.float32)
    upstream = tl.load(grad + places, mask=inside[:, None], other=0.0).to(tl.float32)
    if RECTIFY:
        upstream = tl.where(values * slope + tl.load(shift + channels)[None, :] > 0, upstream, 0.0)
    weight = tl.load(share + rows // IMAGE, mask=inside, other=0.0)[:, None]
    through = tl.load(d_mean + channels)[None, :] + 2.0 * values * tl.load(d_variance + channels)[None, :]
    tl.store(d_x + places, (upstream * slope + weight * through).to(d_x.dtype.element_ty), mask=inside[:, None])


def _partial(x: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    shape = (blocks, x.shape[1])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


# The split of the rows is an argument so that a compiled graph, and the compiler's cache, know the output shape.
@torch.library.custom_op("fedecho::channel_sums", mutates_args=())
def channel_sums(x: Tensor, share: Tensor, blocks: int, tiles: int, rows: int) -> tuple[Tensor, Tensor]:
    """Per-block sums of share x and of share x^2, [blocks, channels] each; ``share`` has one entry per image."""
    num, channels, height, width = x.shape
    (first, second), pixels = _partial(x, blocks), height * width
    sizes = {"IMAGE": pixels, "TILES": tiles, "ROWS": rows, "C": channels}
    _sums[(blocks,)](_channels_last(x), _per_image(share, num), first, second, num * pixels, **sizes, num_warps=WARPS)
    return first, second


@channel_sums.register_fake
def _(x: Tensor, share: Tensor, blocks: int, tiles: int, rows: int) -> tuple[Tensor, Tensor]:
    return _partial(x, blocks)


@torch.library.custom_op("fedecho::channel_gradient_sums", mutates_args=())
def channel_gradient_sums(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool, blocks: int, tiles: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Per-block sums of grad and of grad x over the pixels where relu(scale x + shift) is active (or over all)."""
    first, second = _partial(x, blocks)
    vectors, num_rows = (scale.contiguous(), shift.contiguous()), x.numel() // x.shape[1]
    sizes = {"RECTIFY": rectify, "TILES": tiles, "ROWS": rows, "C": x.shape[1]}
    _gradient_sums[(blocks,)](
        _channels_last(grad), _channels_last(x), *vectors, first, second, num_rows, **sizes, num_warps=WARPS
    )
    return first, second


@channel_gradient_sums.register_fake
def _(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool, blocks: int, tiles: int, rows: int
) -> tuple[Tensor, Tensor]:
    return _partial(x, blocks)


@torch.library.custom_op("fedecho::channel_normalised", mutates_args=())
def channel_normalised(x: Tensor, scale: Tensor, shift: Tensor, extra: Tensor | None, rectify: bool) -> Tensor:
    """scale x + shift, its relu, or the relu of its sum with ``extra``."""
    values, y = _channels_last(x), torch.empty_like(x, memory_format=torch.channels_last)
    num_rows, rows = x.numel() // x.shape[1], max(1, TILE // x.shape[1])
    vectors, more = (scale.contiguous(), shift.contiguous()), values if extra is None else _channels_last(extra)
    sizes = {"EXTRA": extra is not None, "RECTIFY": rectify, "ROWS": rows, "C": x.shape[1]}
    _normalised[(triton.cdiv(num_rows, rows),)](values, *vectors, more, y, num_rows, **sizes, num_warps=WARPS)
    return y


@channel_normalised.register_fake
def _(x: Tensor, scale: Tensor, shift: Tensor, extra: Tensor | None, rectify: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.custom_op("fedecho::channel_input_gradient", mutates_args=())
def channel_input_gradient(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, share: Tensor, d_mean: Tensor, d_variance: Tensor, rectify: bool
) -> Tensor:
    """Gradient with respect to x; see ``channel_ops.input_gradient``."""
    num, channels, height, width = x.shape
    num_rows, rows = num * height * width, max(1, TILE // channels)
    upstream, values, d_x = _channels_last(grad), _channels_last(x), torch.empty_like(x, memory_format=torch.channels_last)
    vectors = [each.contiguous() for each in (scale, shift, _per_image(share, num), d_mean, d_variance)]
    sizes = {"RECTIFY": rectify, "IMAGE": height * width, "ROWS": rows, "C": channels}
    _input_gradient[(triton.cdiv(num_rows, rows),)](upstream, values, *vectors, d_x, num_rows, **sizes, num_warps=WARPS)
    return d_x


@channel_input_gradient.register_fake
def _(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, share: Tensor, d_mean: Tensor, d_variance: Tensor, rectify: bool
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _per_image(share: Tensor, num: int) -> Tensor:
    """Expand a share, which may be a single number for all images, to one number per image."""
    return share.expand(num).contiguous()

"""BatchNorm's sums and maps on a GPU, in Triton. Pixels are rows of channels, as channels-last memory has them.

A block of threads takes many rows and leaves partial sums of its own, so that the order of adding is always the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedecho.gpu.channel_ops import TILE

WARPS = 4
"""128 threads: each loads 16 bytes twice for a tile."""


@triton.jit
def _sums(x, share, first, second, num_rows, IMAGE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr):
    """Sums of share x and of share x^2 over this block's rows; an image has IMAGE of them."""
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


# How the rows are cut is an argument, so that a compiled graph, and a compiler's cache of it, knows the shape of what comes out.
@torch.library.custom_op("fedecho::channel_sums", mutates_args=())
def channel_sums(x: Tensor, share: Tensor, blocks: int, tiles: int, rows: int) -> tuple[Tensor, Tensor]:
    """Each block's sums of share x and of share x^2 over its pixels: [blocks, channels] each. ``share`` is one number an image."""
    num, channels, height, width = x.shape
    (first, second), pixels = _partial(x, blocks), height * width
    sizes = {"IMAGE": pixels, "TILES": tiles, "ROWS": rows, "C": channels}
    _sums[(blocks,)](_lasting(x), _each(share, num), first, second, num * pixels, **sizes, num_warps=WARPS)
    return first, second


@channel_sums.register_fake
def _(x: Tensor, share: Tensor, blocks: int, tiles: int, rows: int) -> tuple[Tensor, Tensor]:
    return _partial(x, blocks)


@torch.library.custom_op("fedecho::channel_gradient_sums", mutates_args=())
def channel_gradient_sums(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool, blocks: int, tiles: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Each block's sums of grad and of grad x, of the pixels that a ReLU behind scale x + shift lets through (or of all)."""
    first, second = _partial(x, blocks)
    vectors, num_rows = (scale.contiguous(), shift.contiguous()), x.numel() // x.shape[1]
    sizes = {"RECTIFY": rectify, "TILES": tiles, "ROWS": rows, "C": x.shape[1]}
    _gradient_sums[(blocks,)](_lasting(grad), _lasting(x), *vectors, first, second, num_rows, **sizes, num_warps=WARPS)
    return first, second


@channel_gradient_sums.register_fake
def _(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, rectify: bool, blocks: int, tiles: int, rows: int
) -> tuple[Tensor, Tensor]:
    return _partial(x, blocks)


@torch.library.custom_op("fedecho::channel_normalised", mutates_args=())
def channel_normalised(x: Tensor, scale: Tensor, shift: Tensor, extra: Tensor | None, rectify: bool) -> Tensor:
    """scale x + shift, or relu of it, or relu of it and ``extra``."""
    values, y = _lasting(x), torch.empty_like(x, memory_format=torch.channels_last)
    num_rows, rows = x.numel() // x.shape[1], max(1, TILE // x.shape[1])
    vectors, more = (scale.contiguous(), shift.contiguous()), values if extra is None else _lasting(extra)
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
    """The gradient of x, see ``channel_ops.input_gradient``."""
    num, channels, height, width = x.shape
    num_rows, rows = num * height * width, max(1, TILE // channels)
    upstream, values, d_x = _lasting(grad), _lasting(x), torch.empty_like(x, memory_format=torch.channels_last)
    vectors = [each.contiguous() for each in (scale, shift, _each(share, num), d_mean, d_variance)]
    sizes = {"RECTIFY": rectify, "IMAGE": height * width, "ROWS": rows, "C": channels}
    _input_gradient[(triton.cdiv(num_rows, rows),)](upstream, values, *vectors, d_x, num_rows, **sizes, num_warps=WARPS)
    return d_x


@channel_input_gradient.register_fake
def _(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, share: Tensor, d_mean: Tensor, d_variance: Tensor, rectify: bool
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _lasting(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _each(share: Tensor, num: int) -> Tensor:
    """A number for every image, one behind the other, of one that may stand for all."""
    return share.expand(num).contiguous()

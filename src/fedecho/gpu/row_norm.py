"""BatchNorm over the rows that count: a batch of fixed size can hold a smaller one; convolutions as patch products."""

from typing import Any

import torch
from torch import Tensor, cat, fx, nn
from torch.nn.functional import batch_norm, linear, pad, relu

from fedecho.gpu.channel_ops import gradient_sums, input_gradient, normalised, sums
from fedecho.gpu.fused import all_rectified, tidied, traced

FEW_CHANNELS = 8
"""Below this a convolution kernel leaves tensor cores mostly idle."""


class PatchConv2d(nn.Module):
    """Takes the place of an ``nn.Conv2d`` under the same names. Patches are filled up with zeros: tensor cores want eights."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.kernel, self.stride = like.kernel_size[0], like.stride[0]
        self.padding = int(like.padding[0])
        self.fill = -(like.in_channels * self.kernel**2) % 8

    def forward(self, x: Tensor) -> Tensor:
        around = (self.padding,) * 4
        wide = pad(x, around) if self.padding else x
        side = [(size - self.kernel) // self.stride + 1 for size in wide.shape[2:]]
        patches = cat([self._shifted(wide, down, across, side) for down in self._offsets for across in self._offsets], dim=1)
        rows = pad(patches, (0, 0, 0, 0, 0, self.fill)).permute(0, 2, 3, 1)
        weight = pad(self.weight.permute(0, 2, 3, 1).flatten(1), (0, self.fill))
        return linear(rows, weight, self.bias).permute(0, 3, 1, 2)

    @property
    def _offsets(self) -> range:
        return range(self.kernel)

    def _shifted(self, x: Tensor, down: int, across: int, side: list[int]) -> Tensor:
        """What the kernel's element (down, across) sees at every place of the output."""
        last_row, last_column = (start + self.stride * (n - 1) + 1 for start, n in zip((down, across), side, strict=True))
        return x[:, :, down : last_row : self.stride, across : last_column : self.stride]


def suits_patches(conv: nn.Conv2d) -> bool:
    """Square, plain, and of few channels or 1 x 1."""
    square = all(len(set(pair)) == 1 for pair in (conv.kernel_size, conv.stride, conv.dilation))
    plain = conv.groups == 1 and conv.dilation[0] == 1 and conv.padding_mode == "zeros"
    padded = not isinstance(conv.padding, str) and len(set(conv.padding)) == 1
    return square and plain and padded and (conv.in_channels < FEW_CHANNELS or conv.kernel_size[0] == 1)


class RowBatchNorm2d(nn.Module):
    """Takes the place of an ``nn.BatchNorm2d`` under the same names. ``row_weight`` is 1 / n for n rows that count, else 0."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    row_weight: Tensor

    def __init__(self, like: nn.BatchNorm2d) -> None:
        super().__init__()
        if like.momentum is None or not like.affine or not like.track_running_stats:
            raise ValueError("only affine BatchNorm with a momentum and running statistics can be captured")
        self.weight, self.bias = like.weight, like.bias
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)
        self.register_buffer("row_weight", torch.ones(1), persistent=False)
        self.eps, self.momentum = like.eps, like.momentum

    def forward(self, x: Tensor, extra: Tensor | None = None, rectify: bool = False) -> Tensor:
        """The normalised x, or relu of it, or relu of it and ``extra``."""
        if not self.training:
            y = batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
            y = y if extra is None else y + extra
            return relu(y) if rectify else y
        share = self.row_weight / (x.shape[2] * x.shape[3])
        y, mean, variance = Normalised.apply(x, self.weight, self.bias, share, extra, self.eps, rectify)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            # n / (n - 1) over the values that counted: 1 / share.max() of them.
            unbiased = variance / (1.0 - share.max()).clamp_min(1e-12)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        out: Tensor = y
        return out


class Normalised(torch.autograd.Function):
    """y = relu((x - mean) scale + bias + extra) with its gradient by hand, for the sake of memory traffic, which is what it costs.

    Left to itself, autograd reads y again to know where the ReLU was closed; without ``extra`` x, which is read anyway, tells.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, share: Tensor, extra: Tensor | None, eps: float, rectify: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, mean_square = sums(x, share)
        raw = mean_square - mean * mean
        variance = raw.clamp_min(0.0)
        rstd = torch.rsqrt(variance + eps)
        scale = weight * rstd
        shift = bias - mean * scale
        y = normalised(x, scale, shift, extra, rectify)
        ctx.rectify, ctx.with_extra = rectify, extra is not None
        ctx.save_for_backward(x, y if rectify and extra is not None else None, share, mean, raw, rstd, scale, shift)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, y, share, mean, raw, rstd, scale, shift = ctx.saved_tensors
        grad = upstream[0] if y is None else torch.where(y > 0, upstream[0], 0.0)
        closed_by_x = ctx.rectify and y is None
        d_shift, d_scale = gradient_sums(grad, x, scale, shift, closed_by_x)
        # y = scale x + shift, scale = weight rstd, shift = bias - mean scale, rstd = (E[x^2] - mean^2 + eps)^(-1/2).
        d_scale = d_scale - mean * d_shift
        d_variance = torch.where(raw >= 0, d_scale * scale * rstd * rstd * -0.5, 0.0)
        d_mean = -scale * d_shift - 2.0 * mean * d_variance
        d_x = input_gradient(grad, x, scale, shift, share, d_mean, d_variance, closed_by_x)
        return d_x, d_scale * rstd, d_shift, None, grad if ctx.with_extra else None, None, None


def with_row_norm(module: nn.Module) -> nn.Module:
    """The module as it is captured: every BatchNorm2d, the stem and the 1 x 1 convolutions replaced; the same parameters.

    A ReLU behind a BatchNorm becomes a part of it, where the network can be traced.
    """
    swapped = _swapped(module)
    network = traced(swapped, RowBatchNorm2d, PatchConv2d)
    if network is None:
        return swapped

    def is_norm(node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(network.get_submodule(str(node.target)), RowBatchNorm2d)

    for place in all_rectified(network, is_norm):
        with network.graph.inserting_before(place.end):
            one = network.graph.call_module(str(place.norm.target), (place.norm.args[0], place.extra, True))
        place.end.replace_all_uses_with(one)
    return tidied(network)


def _swapped(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, RowBatchNorm2d(child))
        elif isinstance(child, nn.Conv2d) and suits_patches(child):
            setattr(module, name, PatchConv2d(child))
        else:
            _swapped(child)
    return module

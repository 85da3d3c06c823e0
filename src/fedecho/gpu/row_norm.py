"""BatchNorm that ignores padding rows, so that a batch of fixed size can hold a smaller one; convolutions as patch products."""

from typing import Any

import torch
from torch import Tensor, cat, fx, nn
from torch.nn.functional import batch_norm, linear, pad, relu

from fedecho.gpu.channel_ops import gradient_sums, input_gradient, normalised, sums
from fedecho.gpu.fused import cleaned_up, relu_sites, traced

FEW_CHANNELS = 8
"""Below this many input channels, convolution kernels leave tensor cores mostly idle."""


class PatchConv2d(nn.Module):
    """Replaces an ``nn.Conv2d`` with the same parameter names. Patches are zero-padded to a multiple of 8 for tensor cores."""

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
        """Return the input value under kernel element (down, across) for every output position."""
        last_row, last_column = (start + self.stride * (n - 1) + 1 for start, n in zip((down, across), side, strict=True))
        return x[:, :, down : last_row : self.stride, across : last_column : self.stride]


def suits_patches(conv: nn.Conv2d) -> bool:
    """Whether a convolution is square and plain, with few channels or a 1 x 1 kernel."""
    square = all(len(set(pair)) == 1 for pair in (conv.kernel_size, conv.stride, conv.dilation))
    plain = conv.groups == 1 and conv.dilation[0] == 1 and conv.padding_mode == "zeros"
    padded = not isinstance(conv.padding, str) and len(set(conv.padding)) == 1
    return square and plain and padded and (conv.in_channels < FEW_CHANNELS or conv.kernel_size[0] == 1)


class RowBatchNorm2d(nn.Module):
    """Replaces an ``nn.BatchNorm2d`` under the same names. ``row_weight`` is 1 / n for each of n real rows, 0 for padding."""

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
        """Return the normalised x, its relu, or the relu of its sum with ``extra``."""
        if not self.training:
            y = batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
            y = y if extra is None else y + extra
            return relu(y) if rectify else y
        share = self.row_weight / (x.shape[2] * x.shape[3])
        y, mean, variance = Normalised.apply(x, self.weight, self.bias, share, extra, self.eps, rectify)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            # n / (n - 1) for the n = 1 / share.max() values that count.
            unbiased = variance / (1.0 - share.max()).clamp_min(1e-12)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        out: Tensor = y
        return out


class Normalised(torch.autograd.Function):
    """y = relu((x - mean) scale + bias + extra) with a hand-written gradient that saves memory traffic, the main cost.

    Autograd would read y again to find where the ReLU is inactive; without ``extra``, x (which is read anyway) suffices.
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
        mask_from_x = ctx.rectify and y is None
        d_shift, d_scale = gradient_sums(grad, x, scale, shift, mask_from_x)
        # y = scale x + shift, scale = weight rstd, shift = bias - mean scale, rstd = (E[x^2] - mean^2 + eps)^(-1/2).
        d_scale = d_scale - mean * d_shift
        d_variance = torch.where(raw >= 0, d_scale * scale * rstd * rstd * -0.5, 0.0)
        d_mean = -scale * d_shift - 2.0 * mean * d_variance
        d_x = input_gradient(grad, x, scale, shift, share, d_mean, d_variance, mask_from_x)
        return d_x, d_scale * rstd, d_shift, None, grad if ctx.with_extra else None, None, None


def with_row_norm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm2d, the stem and the 1 x 1 convolutions for capture; parameters are shared.

    If the network can be traced, a ReLU after a BatchNorm is fused into it.
    """
    swapped = _swapped(module)
    network = traced(swapped, RowBatchNorm2d, PatchConv2d)
    if network is None:
        return swapped

    def is_norm(node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(network.get_submodule(str(node.target)), RowBatchNorm2d)

    for site in relu_sites(network, is_norm):
        with network.graph.inserting_before(site.end):
            fused = network.graph.call_module(str(site.norm.target), (site.norm.args[0], site.extra, True))
        site.end.replace_all_uses_with(fused)
    return cleaned_up(network)


def _swapped(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, RowBatchNorm2d(child))
        elif isinstance(child, nn.Conv2d) and suits_patches(child):
            setattr(module, name, PatchConv2d(child))
        else:
            _swapped(child)
    return module

"""BatchNorm over the rows that count: a batch of fixed size holds a smaller one exactly.

A captured training step has one batch size. A client's last, partial batch runs in it with weight 0 on the rows that are only
filling: statistics, loss and gradients are then those of the smaller batch.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from fedecho.models.patch_conv import PatchConv2d, suits_patches


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

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        pixels = x.shape[2] * x.shape[3]
        share = (self.row_weight / pixels)[:, None, None, None]
        wide = x.float()
        mean = (wide * share).sum(dim=(0, 2, 3))
        variance = ((wide * wide * share).sum(dim=(0, 2, 3)) - mean * mean).clamp_min(0.0)
        with torch.no_grad():
            # n / (n - 1) over the values that counted: 1 / row_weight.max() rows of so many pixels.
            shrink = self.row_weight.max() / pixels
            unbiased = variance / (1.0 - shrink).clamp_min(1e-12)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return (wide * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


def with_row_norm(module: nn.Module) -> nn.Module:
    """The module as it is captured: every BatchNorm2d, the stem and the 1 x 1 convolutions replaced; the same parameters."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, RowBatchNorm2d(child))
        elif isinstance(child, nn.Conv2d) and suits_patches(child):
            setattr(module, name, PatchConv2d(child))
        else:
            with_row_norm(child)
    return module

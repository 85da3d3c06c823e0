"""Strided 1 x 1 convolutions of few channels, which oneDNN gets wrong on x86 CPUs.

For the gradient of their weights it picks every stride-th pixel of a channels-last input into a workspace that is too small
for fewer channels than a vector holds, and writes past its end. With AVX2 and torch 2.13 that was a crash below 8 channels;
others had wrong numbers too (oneDNN issue 6035). 16 is for longer vectors, where we have not seen it.
The built-in networks are channels-last, and a narrow ResNet has such a shortcut.
"""

from torch import Tensor, nn
from torch.nn.functional import conv2d

VECTOR = 16


class Sampled(nn.Module):
    """Takes the place of such an ``nn.Conv2d`` under the same names: it picks the pixels itself, the same sums follow."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.stride, self.groups = like.stride, like.groups

    def forward(self, x: Tensor) -> Tensor:
        down, across = self.stride
        return conv2d(x[..., ::down, ::across], self.weight, self.bias, groups=self.groups)


def without_narrow(module: nn.Module) -> nn.Module:
    """The module, in which every such convolution is replaced; a kind of one's own is left as it is."""
    if type(module) is nn.Conv2d and _is_narrow(module):
        return Sampled(module)
    for name, child in module.named_children():
        setattr(module, name, without_narrow(child))
    return module


def _is_narrow(conv: nn.Conv2d) -> bool:
    pointwise = conv.kernel_size == (1, 1) and conv.padding in ((0, 0), "valid")
    return pointwise and conv.stride != (1, 1) and conv.in_channels // conv.groups < VECTOR

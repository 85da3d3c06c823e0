"""A convolution as a matrix product over patches, where that beats a convolution kernel: a stem, a 1 x 1 shortcut."""

from torch import Tensor, cat, nn
from torch.nn.functional import linear, pad

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

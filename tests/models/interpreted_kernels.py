"""Run with TRITON_INTERPRET=1: the kernels' sums and maps against torch's, for layers of ResNet-18 and for odd ones."""

import torch
from torch import Tensor

from fedecho.models import channel_ops as plain
from fedecho.models.channel_kernels import channel_gradient_sums, channel_input_gradient, channel_normalised, channel_sums

LAYERS = [(50, 64, 32), (50, 128, 16), (50, 256, 8), (50, 512, 4), (7, 128, 5), (3, 16, 3), (1, 2048, 2), (2, 8, 1)]
"""(images, channels, side)."""


def near(ours: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours.float(), expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max()))


rng = torch.Generator().manual_seed(0)
for num, channels, side in LAYERS:
    x, grad, extra = (torch.randn(num, channels, side, side, generator=rng).bfloat16() for _ in range(3))
    x = x.contiguous(memory_format=torch.channels_last)  # the others stay as they are: a kernel must see to that
    share, *vectors = (torch.randn(size, generator=rng) for size in (num, channels, channels, channels, channels))
    scale, shift, d_mean, d_variance = vectors
    for partial, whole in zip(channel_sums(x, share), plain.sums(x, share), strict=True):
        near(partial.sum(dim=0), whole)
    for rectify in (False, True):
        pairs = zip(
            channel_gradient_sums(grad, x, scale, shift, rectify),
            plain.gradient_sums(grad, x, scale, shift, rectify),
            strict=True,
        )
        for partial, whole in pairs:
            near(partial.sum(dim=0), whole)
        for more in (None, extra):
            near(channel_normalised(x, scale, shift, more, rectify), plain.normalised(x, scale, shift, more, rectify), 0.01)
        given = (grad, x, scale, shift, share, d_mean, d_variance, rectify)
        near(channel_input_gradient(*given), plain.input_gradient(*given), 0.01)
print(len(LAYERS), "layers")

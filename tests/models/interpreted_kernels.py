"""Run with TRITON_INTERPRET=1: the kernels' sums against torch's, for layers of ResNet-18 and for odd ones."""

import torch

from fedecho.models import channel_sums as plain
from fedecho.models.channel_kernels import channel_gradient_sums, channel_sums

LAYERS = [(50, 64, 32), (50, 128, 16), (50, 256, 8), (50, 512, 4), (7, 128, 5), (3, 16, 3), (1, 2048, 2), (2, 8, 1)]
"""(images, channels, side)."""


def near(partial: tuple[torch.Tensor, torch.Tensor], whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, sums in zip(partial, whole, strict=True):
        torch.testing.assert_close(ours.sum(dim=0), sums, rtol=1e-4, atol=1e-4 * float(sums.abs().max()))


rng = torch.Generator().manual_seed(0)
for num, channels, side in LAYERS:
    x, grad = (torch.randn(num, channels, side, side, generator=rng).bfloat16() for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last)  # the gradient stays as it is: a kernel must see to that
    share, scale, shift = (
        torch.rand(num, generator=rng),
        torch.randn(channels, generator=rng),
        torch.randn(channels, generator=rng),
    )
    near(channel_sums(x, share), plain.sums(x, share))
    for rectify in (False, True):
        ours = channel_gradient_sums(grad, x, scale, shift, rectify)
        near(ours, plain.gradient_sums(grad, x, scale, shift, rectify))
print(len(LAYERS), "layers")

"""Run with TRITON_INTERPRET=1: the kernels' sums and maps against torch's, alone and in a whole network."""

from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import opcheck

from fedecho.core.capture import Precision, forward_of
from fedecho.models import channel_kernels as kernels_file
from fedecho.models import channel_ops as plain
from fedecho.models.channel_kernels import channel_gradient_sums, channel_input_gradient, channel_normalised, channel_sums
from fedecho.models.resnet import resnet18
from fedecho.models.row_norm import with_row_norm

LAYERS = [(10, 64, 32), (9, 128, 16), (11, 256, 8), (6, 512, 4), (7, 128, 5), (3, 16, 3), (1, 2048, 2), (2, 8, 1)]
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
for op, given in (
    (channel_sums, (x, share)),
    (channel_gradient_sums, (grad, x, scale, shift, True)),
    (channel_normalised, (x, scale, shift, extra, True)),
    (channel_input_gradient, (grad, x, scale, shift, share, d_mean, d_variance, True)),
):
    opcheck(op, given)  # what the compiler is told of each: shapes, strides, types, and that nothing given is changed


def gradient(kernels: dict[str, int]) -> Tensor:
    """Of a whole network on a batch that is partly filling; in float32, where nothing but the order of adding may differ."""
    torch.manual_seed(0)
    module = with_row_norm(resnet18(10, width=8)).train()
    params = dict(module.named_parameters())
    buffers = {name: buffer for name, buffer in module.named_buffers() if "running" in name}
    row_weight = torch.tensor([0.2] * 5 + [0.0] * 3)
    with patch.dict(plain.KERNELS, kernels, clear=True), patch.object(plain, "suits_kernels", lambda x: True):
        forward = forward_of(module, Precision(torch.float32, compiled=False))
        logits = forward(params, buffers, torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)), row_weight)
        grads = torch.autograd.grad((logits.log_softmax(1)[:, 0] * row_weight).sum(), list(params.values()))
    return torch.cat([each.float().flatten() for each in (*grads, *buffers.values())])


with patch.object(kernels_file, "channel_sums", wraps=channel_sums) as asked:
    ours, theirs = gradient({"sums": 8, "maps": 8}), gradient({})
assert asked.call_count == 20, "one for each BatchNorm, in one of the two"
assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
print(len(LAYERS), "layers")

"""Run with TRITON_INTERPRET=1: the kernels against torch, on layers of ResNet-18 and odd ones, and in a whole network."""

from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import opcheck

from fedecho.gpu import channel_kernels, channel_ops
from fedecho.gpu.capture import Precision, forward_of
from fedecho.gpu.channel_kernels import channel_gradient_sums, channel_input_gradient, channel_normalised, channel_sums
from fedecho.gpu.channel_ops import cut
from fedecho.gpu.row_norm import with_row_norm
from fedecho.gpu.self_test import fault
from fedecho.tasks.vision.resnet import resnet18

CPU = torch.device("cpu")
SHAPES = [(10, 64, 32, 32), (9, 128, 16, 16), (11, 256, 8, 8), (6, 512, 4, 4)]
SHAPES += [(7, 128, 5, 3), (3, 16, 3, 3), (1, 2048, 2, 2), (2, 8, 1, 1)]


def given(num: int, channels: int, *sides: int) -> tuple[Tensor, ...]:
    """x, grad and extra, not channels last: a kernel must see to that; share, and four vectors."""
    rng = torch.Generator().manual_seed(0)
    images = (torch.randn(num, channels, *sides, generator=rng).bfloat16() for _ in range(3))
    return (*images, torch.rand(num, generator=rng), *torch.randn(4, channels, generator=rng).unbind())


x, grad, extra, share, scale, shift, d_mean, d_variance = given(3, 16, 3, 2)
for op, words in (
    (channel_sums, (x, share, *cut(x))),
    (channel_gradient_sums, (grad, x, scale, shift, True, *cut(x))),
    (channel_normalised, (x, scale, shift, extra, True)),
    (channel_input_gradient, (grad, x, scale, shift, share, d_mean, d_variance, True)),
):
    opcheck(op, words)  # what the compiler is told of each: shapes, strides, types, and that nothing given is changed
wide = share.new_zeros(6)[::2].copy_(share)
for one, two in ((share[:1], share[:1].expand(3).contiguous()), (wide, share)):
    assert torch.equal(channel_sums(x, one, *cut(x))[0], channel_sums(x, two, *cut(x))[0]), "one number for all, or strided"


def gradient(kernels: dict[str, int]) -> Tensor:
    """Of a whole network on a batch that is partly filling; in float32, where nothing but the order of adding may differ."""
    torch.manual_seed(0)
    module = with_row_norm(resnet18(10, width=8)).train()
    params = dict(module.named_parameters())
    buffers = {name: buffer for name, buffer in module.named_buffers() if "running" in name}
    row_weight = torch.tensor([0.2] * 5 + [0.0] * 3)
    with patch.dict(channel_ops.KERNELS, kernels, clear=True), patch.object(channel_ops, "suits_kernels", lambda x: True):
        forward = forward_of(module, Precision(torch.float32, compiled=False))
        logits = forward(params, buffers, torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)), row_weight)
        grads = torch.autograd.grad((logits.log_softmax(1)[:, 0] * row_weight).sum(), list(params.values()))
    return torch.cat([each.float().flatten() for each in (*grads, *buffers.values())])


with patch.object(channel_kernels, "channel_sums", wraps=channel_sums) as asked:
    ours, theirs = gradient({"sums": 8, "maps": 8}), gradient({})
assert asked.call_count == 20, "one for each BatchNorm, in one of the two"
assert float((ours - theirs).norm() / theirs.norm()) < 1e-4

with (
    patch.dict(channel_ops.KERNELS, {"sums": 8, "maps": 8}),
    patch.object(channel_ops, "suits_kernels", lambda x: x.dtype == torch.bfloat16),
):
    for shape in SHAPES:
        assert not fault(CPU, shape), fault(CPU, shape)
print(len(SHAPES), "layers")

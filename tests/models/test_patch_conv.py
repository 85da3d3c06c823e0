"""A convolution over patches against torch's own."""

import pytest
import torch
from torch import nn

from fedecho.gpu.row_norm import PatchConv2d, suits_patches

CONVS = [
    nn.Conv2d(3, 7, 3, 1, 1, bias=False),
    nn.Conv2d(3, 4, 5, 2, 2),
    nn.Conv2d(1, 2, 3, 3, 0),
    nn.Conv2d(9, 6, 1, 2, bias=False),
    nn.Conv2d(16, 3, 1),
]


@pytest.mark.parametrize("conv", CONVS, ids=str)
@pytest.mark.parametrize("size", [(8, 8), (9, 11)])
def test_values_and_gradients_are_the_convolutions(conv: nn.Conv2d, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = conv.double()
    patches = PatchConv2d(plain)
    x = torch.randn(2, plain.in_channels, *size, dtype=torch.float64, requires_grad=True)
    wanted, got = plain(x), patches(x)
    torch.testing.assert_close(got, wanted)
    upstream, tensors = torch.randn_like(wanted), [x, *plain.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(got, tensors, upstream), torch.autograd.grad(wanted, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_only_what_gains_is_replaced() -> None:
    assert all(suits_patches(conv) for conv in CONVS)
    kept = [
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(3, 4, (3, 1)),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    ]
    assert not any(suits_patches(conv) for conv in kept)

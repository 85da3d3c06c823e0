"""A padded batch with row weights is exactly the smaller batch."""

import pytest
import torch
from torch import nn

from fedecho.core.layout import Layout
from fedecho.gpu.capture import Precision, forward_of
from fedecho.gpu.row_norm import RowBatchNorm2d, with_row_norm
from fedecho.tasks.vision.resnet import resnet18


def test_resnet18_has_the_papers_number_of_parameters() -> None:
    assert sum(p.numel() for p in resnet18(10).parameters()) == 11_173_962


@pytest.mark.parametrize("count", [1, 3, 8])
def test_row_norm_of_a_padded_batch_is_batch_norm_of_the_rows_that_count(count: int) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(5).double()
    nn.init.normal_(plain.weight)
    rows = RowBatchNorm2d(nn.BatchNorm2d(5)).double()
    rows.load_state_dict(plain.state_dict(), strict=False)
    rows.float()
    plain.float()
    x = torch.randn(8, 5, 4, 4) * 3 + 1
    weight = torch.zeros(8)
    weight[:count] = 1 / count
    rows.row_weight = weight
    small, padded = x[:count].clone().requires_grad_(), x.clone().requires_grad_()
    upstream = torch.randn(8, 5, 4, 4)
    upstream[count:] = 0
    expected, got = plain(small), rows(padded)
    expected.backward(upstream[:count])
    got.backward(upstream)
    torch.testing.assert_close(got[:count], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded.grad[:count], small.grad, rtol=1e-3, atol=1e-5)
    assert not padded.grad[count:].any()
    torch.testing.assert_close(rows.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.running_mean, plain.running_mean)
    torch.testing.assert_close(rows.running_var, plain.running_var, rtol=1e-4, atol=1e-5)


def test_the_functional_forward_is_the_module() -> None:
    """In fp32 and with all rows counting, under the same names, in training and in evaluation."""
    module = resnet18(10, width=4)
    layout = Layout.of(module)
    weights = layout.pack(module)
    named = layout.named(weights)
    images = torch.randn(6, 3, 32, 32)
    expected = module.train()(images)
    swapped = with_row_norm(resnet18(10, width=4)).train()
    forward = forward_of(swapped, Precision(dtype=torch.float32, compiled=False))
    params = {part.name: named[part.name] for part in layout.params}
    buffers = {part.name: named[part.name] for part in layout.buffers}
    got = forward(params, buffers, images, torch.full((6,), 1 / 6))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    for part in layout.buffers:
        torch.testing.assert_close(buffers[part.name], module.get_buffer(part.name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_extra", [False, True])
def test_a_relu_inside_has_the_gradients_of_one_behind(with_extra: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    plain = nn.BatchNorm2d(5)
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(torch.randn(5, generator=rng))
    rows = RowBatchNorm2d(nn.BatchNorm2d(5))
    rows.load_state_dict(plain.state_dict(), strict=False)
    rows.row_weight = torch.full((6,), 1 / 6)
    x, extra, upstream = (torch.randn(6, 5, 4, 4, generator=rng) for _ in range(3))
    ours, theirs = ([x.clone().requires_grad_(), extra.clone().requires_grad_()] for _ in range(2))
    got = rows(ours[0], ours[1] if with_extra else None, True)
    normed = plain(theirs[0])
    expected = torch.relu(normed + theirs[1] if with_extra else normed)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad)
    torch.testing.assert_close(rows.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-4)


def test_every_relu_of_a_resnet_is_inside_a_norm() -> None:
    swapped = with_row_norm(resnet18(10, width=4))
    assert "relu" not in swapped.code
    assert sum(isinstance(layer, RowBatchNorm2d) for layer in swapped.modules()) == 20
    assert set(dict(swapped.named_parameters())) == set(dict(resnet18(10, width=4).named_parameters()))

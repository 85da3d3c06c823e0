"""BatchNorm's own kernels on a GPU: the sums against torch's, and a compiled network with them against one without."""

from collections.abc import Mapping

import pytest
import torch
from small_cifar import ON_GPU
from torch import Tensor

from fedecho.core.capture import Precision, forward_of
from fedecho.models import channel_sums
from fedecho.models.resnet import resnet18
from fedecho.models.row_norm import with_row_norm

pytestmark = ON_GPU
LAYERS = [(50, 64, 32), (50, 128, 16), (50, 256, 8), (50, 512, 4), (7, 128, 5)]


@pytest.mark.parametrize(("num", "channels", "side"), LAYERS)
def test_the_sums_are_torchs(num: int, channels: int, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, grad = (torch.randn(num, channels, side, side, device="cuda").bfloat16() for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last)
    share, scale, shift = (torch.randn(size, device="cuda") for size in (num, channels, channels))
    monkeypatch.setattr(channel_sums, "use_kernels", True)
    assert channel_sums.HAS_TRITON
    assert channel_sums.suits_kernels(x)

    def all_sums() -> list[Tensor]:
        both = [channel_sums.gradient_sums(grad, x, scale, shift, rectify) for rectify in (False, True)]
        return [each for pair in (channel_sums.sums(x, share), *both) for each in pair]

    ours = all_sums()
    assert all(torch.equal(one, two) for one, two in zip(ours, all_sums(), strict=True))
    monkeypatch.setattr(channel_sums, "use_kernels", False)
    for kernel, plain in zip(ours, all_sums(), strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


def gradients(params: Mapping[str, Tensor], images: Tensor, row_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of a freshly compiled network, as one vector, and the statistics it gathered."""
    torch._dynamo.reset()
    network = with_row_norm(resnet18(10, width=16)).cuda().train()
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers() if "running" in name}
    logits = forward_of(network, Precision())(params, buffers, images, row_weight)
    loss = (logits.log_softmax(1)[:, 0] * row_weight).sum()
    grads = torch.autograd.grad(loss, list(params.values()))
    return torch.cat([grad.float().flatten() for grad in grads]), torch.cat([each.flatten() for each in buffers.values()])


def test_a_compiled_network_with_the_kernels_trains_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = resnet18(10, width=16).cuda()
    params = {
        name: (param.bfloat16() if param.ndim > 1 else param).detach().requires_grad_()
        for name, param in network.named_parameters()
    }
    images = torch.randn(50, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    row_weight = torch.tensor([1 / 30] * 30 + [0.0] * 20, device="cuda")
    monkeypatch.setattr(channel_sums, "use_kernels", True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        grad, statistics = gradients(params, images, row_weight)
        torch.cuda.synchronize()
    assert {"_sums", "_gradient_sums"} <= {event.name for event in profile.events()}
    monkeypatch.setattr(channel_sums, "use_kernels", False)
    plain_grad, plain_statistics = gradients(params, images, row_weight)
    assert float((grad - plain_grad).norm() / plain_grad.norm()) < 0.05
    torch.testing.assert_close(statistics, plain_statistics, rtol=2e-2, atol=2e-3)

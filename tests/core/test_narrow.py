"""Strided 1 x 1 convolutions of few channels against torch's own in float64."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fedecho.core.layout import Layout, StridedPointwise, replace_narrow
from fedecho.tasks.vision.resnet import resnet18


def gradients(module: nn.Module, images: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    module(images).square().mean().backward()
    return {name: p.grad.double().clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(4, 8, 1, 2), nn.Conv2d(3, 8, 1, (2, 3), bias=False), nn.Conv2d(6, 4, 1, 3, groups=2)]
)
def test_the_same_sums(conv: nn.Conv2d) -> None:
    exact, sampled = deepcopy(conv).double(), replace_narrow(deepcopy(conv))
    assert isinstance(sampled, StridedPointwise)
    images = torch.randn(5, conv.in_channels, 11, 11)
    torch.testing.assert_close(sampled(images).double(), exact(images.double()), rtol=1e-5, atol=1e-6)
    wanted = gradients(exact, images.double())
    found = gradients(sampled, images.contiguous(memory_format=torch.channels_last))
    assert list(found) == list(wanted)
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, 2), nn.Conv2d(16, 8, 1, 2), nn.Conv2d(4, 8, 1, 2, padding=1)], ids=str
)
def test_others_are_left_alone(conv: nn.Conv2d) -> None:
    assert replace_narrow(conv) is conv


def test_a_bound_network_keeps_its_names_and_trains_rightly() -> None:
    """On a CPU with AVX2, torch 2.13's own convolutions end the process or give other gradients."""
    torch.manual_seed(0)
    module = resnet18(10, width=1)
    exact, layout, images = deepcopy(module).double(), Layout.of(module), torch.randn(8, 3, 32, 32)
    bound = layout.bind(module)
    assert [name for name, _ in bound.module.named_parameters()] == [name for name, _ in exact.named_parameters()]
    wanted, found = gradients(exact, images.double()), gradients(bound.module, images)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-2, atol=1e-4 * float(grad.abs().max()) + 1e-6)


def test_many_steps_of_a_narrow_network_harm_no_memory() -> None:
    """In a process of its own, since what is to be seen is that it ends well."""
    steps = (
        "import torch\nfrom fedecho.core.layout import Layout\nfrom fedecho.tasks.vision.resnet import resnet18\n"
        "torch.set_num_threads(1)\nmodule = resnet18(10, width=2)\nbound = Layout.of(module).bind(module)\n"
        "for _ in range(10): bound.module(torch.randn(5, 3, 32, 32)).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", steps], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

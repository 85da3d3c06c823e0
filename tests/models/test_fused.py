"""Fused inference against the original module."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedecho.gpu.fused import Fold, convolution, fused_inference
from fedecho.tasks.vision.digits import small_cnn
from fedecho.tasks.vision.resnet import resnet18


def as_it_is(work: Fold) -> Fold:
    return work


def lived_in(module: nn.Module) -> nn.Module:
    """With statistics and scales that a fold must not forget."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=rng))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=rng))
        for param in module.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=rng))
    return module


def through(module: nn.Module, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    fused = fused_inference(copy.deepcopy(module), dtype, as_it_is)
    assert fused is not None
    with torch.no_grad():
        return fused(dict(module.named_parameters()), dict(module.named_buffers()), images, torch.ones(1))


class Biased(nn.Module):
    """A convolution with a bias, and a sum whose shortcut comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x))).mean(dim=(2, 3))


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: resnet18(width=8), (5, 3, 32, 32)), (small_cnn, (5, 1, 8, 8)), (Biased, (5, 3, 6, 6))]
)
def test_it_is_the_module(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module, images = lived_in(make()), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = module.eval()(images).detach()
    assert float(plain.std(dim=0).min()) > 0.01  # alive
    torch.testing.assert_close(through(module, images), plain, rtol=1e-4, atol=1e-4)


def test_low_precision_is_as_near_as_the_module_in_low_precision() -> None:
    module, images = lived_in(resnet18(width=8)), torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = module.eval()(images)
        low = copy.deepcopy(module).to(torch.bfloat16)(images.to(torch.bfloat16)).float()
        fused = through(module, images, torch.bfloat16)
    assert float((fused - exact).norm()) < 1.5 * float((low - exact).norm())


def test_every_relu_of_a_resnet_is_inside_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object) -> Tensor:
        calls.append(args[1] is not None)
        return convolution(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("fedecho.gpu.fused.convolution", counted)
    through(lived_in(resnet18(width=8)), torch.randn(2, 3, 32, 32))
    assert (len(calls), sum(calls)) == (17, 8)


class Undecided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_fused_is_left_alone() -> None:
    assert fused_inference(Undecided(), torch.float32, as_it_is) is None
    assert fused_inference(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), torch.float32, as_it_is) is None


def test_a_norm_with_another_user_is_not_folded_away() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            return torch.relu(y) - y

    assert fused_inference(Shared(), torch.float32, as_it_is) is None

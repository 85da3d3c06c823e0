"""Sums and maps of every channel's pixels: torch's way against float64, and the kernels in Triton's interpreter against torch's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedecho.gpu.channel_ops import gradient_sums, input_gradient, normalised, suits_kernels, sums


def by_channel(vector: torch.Tensor) -> torch.Tensor:
    return vector.double()[:, None, None]


def test_sums_and_maps_are_those_of_float64() -> None:
    rng = torch.Generator().manual_seed(0)
    x, grad, extra = (torch.randn(5, 16, 3, 4, generator=rng) for _ in range(3))
    share, *vectors = (torch.randn(size, generator=rng) for size in (5, 16, 16, 16, 16))
    (scale, shift, d_mean, d_variance), wide = vectors, x.double()

    def near(ours: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)

    first, second = sums(x, share)
    near(first, torch.einsum("nchw,n->c", wide, share.double()))
    near(second, torch.einsum("nchw,n->c", wide**2, share.double()))
    y = wide * by_channel(scale) + by_channel(shift)
    near(normalised(x, scale, shift, None, False), y)
    near(normalised(x, scale, shift, None, True), y.clamp_min(0))
    near(normalised(x, scale, shift, extra, True), (y + extra).clamp_min(0))
    for rectify in (False, True):
        let_through = grad.double() * (y > 0) if rectify else grad.double()
        first, second = gradient_sums(grad, x, scale, shift, rectify)
        near(first, let_through.sum((0, 2, 3)))
        near(second, (let_through * wide).sum((0, 2, 3)))
        through = share.double()[:, None, None, None] * (by_channel(d_mean) + 2 * wide * by_channel(d_variance))
        ours = input_gradient(grad, x, scale, shift, share, d_mean, d_variance, rectify)
        near(ours, let_through * by_channel(scale) + through)


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "suited"),
    [
        ((50, 64, 32, 32), torch.bfloat16, "cuda", True),
        ((50, 64, 32, 32), torch.bfloat16, "cpu", False),
        ((50, 64, 32, 32), torch.float32, "cuda", False),
        ((50, 48, 32, 32), torch.bfloat16, "cuda", False),
        ((50, 4, 32, 32), torch.bfloat16, "cuda", False),
        ((50, 4096, 2, 2), torch.bfloat16, "cuda", False),
        ((2048, 1024, 32, 32), torch.bfloat16, "cuda", False),
    ],
)
def test_what_suits_the_kernels(shape: tuple[int, ...], dtype: torch.dtype, device: str, suited: bool) -> None:
    """Whole powers of two of channels, in bf16, on a GPU, and no more values than 32 bits can count."""
    with FakeTensorMode():
        assert suits_kernels(torch.empty(shape, dtype=dtype, device=device)) == suited


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with a torch for CUDA")
def test_the_kernels_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads the setting when the kernels are defined."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8 layers" in done.stdout

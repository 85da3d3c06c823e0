"""The check that a device computes matrix products correctly."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedecho.gpu.self_test import MOST_AWAY, SHARE, wrong_products
from fedecho.runs import on_gpu as gpu

CPU = torch.device("cpu")
linear = functional.linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_multiplies(dtype: torch.dtype) -> None:
    assert wrong_products(CPU, dtype) == ""


def one_row_wrong(left: Tensor, right: Tensor) -> Tensor:
    product = linear(left, right)
    product[3] *= 4
    return product


def rounded(left: Tensor, right: Tensor) -> Tensor:
    """To the 4 bits of a float8, which is not bf16."""
    return linear(left, right).to(torch.float8_e4m3fn).bfloat16()


@pytest.mark.parametrize("product", [lambda left, right: linear(left, right) * torch.nan, one_row_wrong, rounded])
def test_what_is_wrong_is_told(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE, raising=False)
    monkeypatch.setattr(functional, "linear", product)
    told = wrong_products(CPU)
    assert told.startswith("a product of 512 x 768 times 768 x 768 in bfloat16 is wrong (relative error ")
    assert SHARE not in told
    monkeypatch.setenv(SHARE, "40")
    assert wrong_products(CPU).endswith("; CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is 40, try unsetting it")


def test_a_sound_device_is_far_below_the_limit() -> None:
    left, right = torch.randn(512, 768), torch.randn(3072, 768)
    wanted = left.double() @ right.double().T
    away = (linear(left.bfloat16(), right.bfloat16()).double() - wanted).norm() / wanted.norm()
    assert float(away) < MOST_AWAY / 3


def test_no_run_begins_on_such_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(gpu, "wrong_products", lambda device: "it cannot")
    with pytest.raises(ValueError, match=r"^the GPU cannot be used: it cannot$"):
        gpu.select_gpu()

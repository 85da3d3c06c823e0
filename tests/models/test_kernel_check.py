"""Kernels that are wrong or do not run are not used. On a CPU both sides of the check are torch's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedecho.gpu import channel_ops
from fedecho.gpu.self_test import check_kernels, fault, norm_shapes
from fedecho.tasks.vision.resnet import resnet18

CPU = torch.device("cpu")
SHAPES = ((5, 16, 4, 3), (5, 128, 3, 3))


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(channel_ops, "HAS_TRITON", True)
    monkeypatch.setattr(channel_ops, "FAULT", "")
    fault.cache_clear()
    yield
    fault.cache_clear()


def wrong_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    right = getattr(channel_ops, name)

    def answer(x: Tensor, *more: Any) -> Any:
        found = right(x, *more)
        return wrong(found) if x.dtype == torch.bfloat16 else found

    monkeypatch.setattr(channel_ops, name, answer)


def test_kernels_that_agree_stay() -> None:
    assert check_kernels(CPU, SHAPES) == channel_ops.FAULT == ""


def one_value(found: Tensor) -> Tensor:
    found[0, 3, 0, 0] += 1.0
    return found


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("sums", lambda found: (found[0] * 1.01, found[1]), "a sum over 16 channels"),
        ("gradient_sums", lambda found: (found[0], found[1] + 5), "a sum of gradients over 16 channels"),
        ("normalised", one_value, "a normalisation over 16 channels"),
        ("input_gradient", one_value, "a gradient over 16 channels"),
        ("normalised", lambda found: found * torch.nan, "differs from torch's by nan"),
        ("normalised", lambda found: found.nan_to_num(), "a normalisation of NaN over 16 channels"),
    ],
)
def test_a_kernel_that_is_wrong_is_named_and_none_is_used(
    name: str, wrong: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_in_bf16(name, monkeypatch, wrong)
    assert told in check_kernels(CPU, SHAPES)
    monkeypatch.setattr(channel_ops, "suits_kernels", lambda x: True)
    assert not channel_ops._by_kernel("sums", torch.zeros(1, 64, 1, 1))
    assert told in check_kernels(CPU, ()), "and the next run is told too"


def refuse(error: Exception) -> Any:
    raise error


def test_a_kernel_that_does_not_run_is_no_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("PTX was compiled with an unsupported toolchain\nat ...")
    wrong_in_bf16("sums", monkeypatch, lambda found: refuse(error))
    assert check_kernels(CPU, SHAPES) == "PTX was compiled with an unsupported toolchain"


def test_a_full_gpu_says_nothing_about_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_in_bf16("sums", monkeypatch, lambda found: refuse(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        check_kernels(CPU, SHAPES)
    assert channel_ops.FAULT == ""


def test_where_there_is_no_triton_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_ops, "HAS_TRITON", False)
    monkeypatch.setattr(channel_ops, "sums", None)
    assert check_kernels(CPU, SHAPES) == ""


def test_what_a_network_gives_its_norms() -> None:
    network = resnet18(10, width=4)
    shapes = norm_shapes(network, torch.zeros(1, 3, 32, 32), (50, 20))
    layers = [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4)]
    assert shapes == {(num, *layer) for num in (50, 20) for layer in layers}
    assert network.training
    assert not any(module._forward_pre_hooks for module in network.modules())

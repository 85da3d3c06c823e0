"""Kernels that are wrong, or do not run, are not used; on a CPU both sides of the check are torch's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedecho.models import channel_ops, kernel_check
from fedecho.models.kernel_check import without_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(channel_ops, "HAS_TRITON", True)
    monkeypatch.setattr(channel_ops, "KERNELS", {"sums": 8, "maps": 128})
    monkeypatch.setattr(kernel_check, "LAYERS", ((16, 4), (128, 3)))
    without_kernels.cache_clear()
    yield
    without_kernels.cache_clear()


def wrong_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    right = getattr(channel_ops, name)

    def answer(x: Tensor, *more: Any) -> Any:
        found = right(x, *more)
        return wrong(found) if x.dtype == torch.bfloat16 else found

    monkeypatch.setattr(channel_ops, name, answer)


def test_kernels_that_agree_stay() -> None:
    assert without_kernels(CPU, 5) == ""
    assert channel_ops.KERNELS


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
    ],
)
def test_a_kernel_that_is_wrong_is_named_and_none_is_used(
    name: str, wrong: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_in_bf16(name, monkeypatch, wrong)
    assert told in without_kernels(CPU, 5)
    assert channel_ops.KERNELS == {}


def test_a_kernel_that_does_not_run_is_no_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(found: Any) -> Any:
        raise RuntimeError("PTX was compiled with an unsupported toolchain\nat ...")

    wrong_in_bf16("sums", monkeypatch, refuse)
    assert without_kernels(CPU, 5) == "PTX was compiled with an unsupported toolchain"
    assert channel_ops.KERNELS == {}


def test_where_there_is_no_triton_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_ops, "HAS_TRITON", False)
    monkeypatch.setattr(channel_ops, "sums", None)
    assert without_kernels(CPU, 5) == ""

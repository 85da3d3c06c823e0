"""Before training on a GPU the kernels are asked; what they say is told, recorded, and the same when a run goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_cifar import EXACT, ON_GPU, experiment, write_noise

from fedecho.gpu import channel_ops, self_test
from fedecho.gpu.capture import Precision
from fedecho.gpu.self_test import fault
from fedecho.runs import on_gpu as gpu
from fedecho.runs.execution import Execution
from fedecho.runs.on_gpu import GpuParts, gpu_settings

LAYERS = [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4)]


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(channel_ops, "FAULT", "")
    fault.cache_clear()
    yield
    fault.cache_clear()


def test_they_are_asked_on_what_the_network_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, asked = list[str](), list[Any]()

    def wrong(device: torch.device, shape: Any) -> str:
        asked.append(shape)
        return "they are wrong" if len(asked) == 8 else ""

    monkeypatch.setattr(channel_ops, "HAS_TRITON", True)
    monkeypatch.setattr(self_test, "fault", wrong)
    parts = GpuParts(experiment(write_noise(tmp_path), "fedecho"), EXACT, torch.device("cpu"), said.append)
    assert (asked, said) == ([], []), "in float32, and on a CPU, there are none"
    parts._check_kernels()
    assert asked == [(num, *layer) for num in (7, 10) for layer in LAYERS]
    assert said == ["BatchNorm uses torch's own operations instead of our kernels: they are wrong"]


@pytest.mark.gpu
@ON_GPU[1]
def test_on_this_gpu_they_are_right(tmp_path: Path) -> None:
    said = list[str]()
    with gpu_settings(Precision(), torch.device("cuda")):
        GpuParts(experiment(write_noise(tmp_path), "fedecho", "task.width=64"), Precision(), torch.device("cuda"), said.append)
    assert said == []


def test_a_run_goes_on_with_the_kernels_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    execution = Execution(executor="cuda")
    with_them = execution.described()
    assert set(with_them) == {"executor", "workers", "precision", "deterministic", "compiled", "device"}
    execution.check_same_kernels(Path("run"), with_them)
    monkeypatch.setattr(channel_ops, "FAULT", "a sum differs")
    without = execution.described()
    execution.check_same_kernels(Path("run"), without)
    with pytest.raises(
        ValueError, match=r"run was computed with FedEcho's own kernels, which fail their self-test here \(a sum differs\)"
    ):
        execution.check_same_kernels(Path("run"), with_them)
    monkeypatch.setattr(channel_ops, "FAULT", "")
    with pytest.raises(ValueError, match=r"run was computed without FedEcho's own kernels \(a sum differs\), which work here"):
        execution.check_same_kernels(Path("run"), without)


def test_what_was_compiled_is_forgotten(tmp_path: Path) -> None:
    one = experiment(write_noise(tmp_path), "fedbuff")
    parts = GpuParts(one, EXACT, torch.device("cpu"))
    first = parts._forward(training=True)
    assert parts._forward(training=True) is first
    gpu.forget_compiled()
    assert parts._forward(training=True) is not first

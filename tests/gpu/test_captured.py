"""The captured program beside the plain one: on the CPU, where lanes run at once, and on a GPU where there is one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from official_files import write_cifar10
from torch import Tensor

from fedecho import Experiment, load, simulate
from fedecho.core.capture import Precision
from fedecho.core.drive import drive
from fedecho.experiments import build
from fedecho.experiments.build import Execution, Simulation, assembled, one_thread
from fedecho.experiments.gpu import GpuParts

EXACT = Precision(dtype=torch.float32, deterministic=True, compiled=False)
Outcome = tuple[list[tuple[float, int, int]], Tensor, Tensor]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred images in the official files, and an unlabeled array."""
    folder, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)

    def noise(num: int) -> tuple[np.ndarray, np.ndarray]:
        """Plain noise: flat pictures would make BatchNorm's gradients ill-conditioned in float32."""
        return rng.integers(0, 256, (num, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, num)

    write_cifar10(folder, noise(300), noise(60))
    np.save(folder / "cifar100-32.npy", noise(40)[0])
    return folder


def experiment(data: Path, algorithm: str, *settings: str) -> Experiment:
    """A small ResNet; clients of some ten images in batches of 7, so that every other batch is a partial one."""
    small = ["task.num_clients=30", "task.width=4", "task.num_unlabeled=20", f"task.data_dir={data}", "local.batch_size=7"]
    small += ["task.partition.alpha=100.0", "local.client_lr=0.001", "local.epochs=1"]
    small += ["concurrency=5"] if algorithm != "fedasync" else ["concurrency=3"]
    if algorithm == "fedecho":
        small += ["algorithm.distiller.batch_size=10", "algorithm.distiller.distill_lr=1e-4"]
    return load("cifar10", algorithm=algorithm, versions=6, settings=[*small, *settings])


@contextmanager
def captured_on_cpu(one: Experiment) -> Iterator[Simulation]:
    parts = GpuParts(one, EXACT, torch.device("cpu"))
    assert parts.eager == ""
    runtimes = build._runtimes(one)
    server = build._server(one, parts.network, build._student_of(one, parts.student))
    executor = parts.executor(3, build._wanted(one, runtimes))
    transport = build._transport(one, executor, runtimes)
    yield Simulation(one, server, transport, runtimes, parts.network.layout, parts.evaluate)
    executor.close()


def outcome(simulation: Simulation) -> Outcome:
    schedule: list[tuple[float, int, int]] = []
    drive(
        simulation.server,
        simulation.transport,
        num_versions=simulation.experiment.num_versions,
        watch=lambda moment: schedule.append((moment.time, moment.receipt.client, moment.receipt.base_version)),
    )
    weights = simulation.server.model.weights
    return schedule, weights.params.cpu(), weights.buffers.cpu()


def close(ours: Tensor, plain: Tensor) -> None:
    assert float((ours - plain).norm() / plain.norm()) < 1e-3


@pytest.mark.parametrize("algorithm", ["fedavg", "fedasync", "fedbuff", "ca2fl", "fedac", "fadas", "fedecho"])
def test_the_captured_program_learns_what_the_plain_one_learns(data: Path, algorithm: str) -> None:
    one = experiment(data, algorithm)
    with one_thread():
        with assembled(one) as plain:
            wanted, scores = outcome(plain), plain.evaluate()
        with captured_on_cpu(one) as captured:
            got, captured_scores = outcome(captured), captured.evaluate()
    assert got[0] == wanted[0]
    close(got[1], wanted[1])
    close(got[2], wanted[2])
    assert captured_scores["accuracy"] == pytest.approx(scores["accuracy"], abs=0.04)


@pytest.mark.parametrize("settings", [["algorithm.distiller.batch_norm=frozen"], ["task.num_unlabeled=25"]])
def test_frozen_statistics_and_a_partial_batch_of_u(data: Path, settings: list[str]) -> None:
    one = experiment(data, "fedecho", *settings)
    with one_thread():
        with assembled(one) as plain:
            wanted = outcome(plain)
        with captured_on_cpu(one) as captured:
            got = outcome(captured)
    close(got[1], wanted[1])
    close(got[2], wanted[2])


def test_what_cannot_be_captured_says_why(data: Path) -> None:
    parts = GpuParts(experiment(data, "fedbuff", "local.optimizer=adamw"), EXACT, torch.device("cpu"))
    assert "adamw" in parts.eager
    with pytest.raises(ValueError, match="DigitsTask cannot be put on a GPU"):
        GpuParts(load("digits"), EXACT, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_executor_says_so(data: Path) -> None:
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        simulate(experiment(data, "fedbuff"), executor="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("algorithm", ["fedbuff", "fedac", "fedecho"])
def test_cuda_agrees_with_serial_and_with_itself(data: Path, algorithm: str) -> None:
    one = experiment(data, algorithm)
    execution = Execution(executor="cuda", precision="fp32", deterministic=True, compiled=False)
    with one_thread():
        with assembled(one) as plain:
            wanted = outcome(plain)
        with assembled(one, execution) as first:
            got = outcome(first)
        with assembled(one, execution) as second:
            again = outcome(second)
    assert got[0] == wanted[0]
    close(got[1], wanted[1])
    assert torch.equal(got[1], again[1])
    assert torch.equal(got[2], again[2])

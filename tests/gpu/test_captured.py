"""The captured program beside the plain one: on the CPU, where lanes run at once, and on a GPU where there is one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_cifar import EXACT, ON_GPU, experiment
from torch import Tensor

from fedecho import ALGORITHMS, Experiment, load, simulate
from fedecho.core.loop import drive
from fedecho.runs import build
from fedecho.runs.build import Execution, Simulation, assembled, one_thread
from fedecho.runs.on_gpu import GpuParts

Outcome = tuple[list[tuple[float, int, int]], Tensor, Tensor]


@contextmanager
def captured_on_cpu(one: Experiment) -> Iterator[Simulation]:
    parts = GpuParts(one, EXACT, torch.device("cpu"))
    assert parts.one_by_one == ""
    runtimes = build.runtimes_of(one)
    server = build.server_of(one, parts.network, parts.student)
    executor = parts.executor(3, build._wanted(one, runtimes))
    transport = build._transport(one, executor, runtimes)
    yield Simulation(one, server, transport, runtimes, parts.network.layout, parts.network.layout.named, parts.evaluate)
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


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedac",
        "fedecho",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name not in ("fedac", "fedecho")),
    ],
)
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


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.distiller.batch_norm=frozen"],
        ["task.num_unlabeled=25"],
        pytest.param(["algorithm.distiller.optimizer=sgd", "algorithm.distiller.distill_lr=0.1"], marks=pytest.mark.slow),
        pytest.param(["algorithm.distiller.max_teacher_age=0"], marks=pytest.mark.slow),
        ["algorithm.distiller.prior_correction=1", "algorithm.distiller.shared_prior=0.5"],
    ],
)
def test_settings_of_the_distiller_and_a_partial_batch_of_u(data: Path, settings: list[str]) -> None:
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
    assert "adamw" in parts.one_by_one
    with pytest.raises(ValueError, match="DigitsTask cannot run on a GPU"):
        GpuParts(load("digits"), EXACT, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_executor_says_so(data: Path) -> None:
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        simulate(experiment(data, "fedbuff"), executor="cuda")


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.parametrize("algorithm", ["fedbuff", "fedac", "fadas", "fedecho"])
def test_cuda_agrees_with_serial_and_with_itself(data: Path, algorithm: str) -> None:
    """Over 20 versions: the same schedule, weights within float tolerance, and the same bytes twice."""
    one = experiment(data, algorithm, versions=20)
    execution = Execution(executor="cuda", precision="fp32", deterministic=True, compiled=False)
    with one_thread():
        with assembled(one) as plain:
            wanted = outcome(plain)
        with assembled(one, execution) as first:
            got = outcome(first)
        with assembled(one, execution) as second:
            again = outcome(second)
    assert got[0] == wanted[0]
    print(algorithm, [float((a - b).norm() / b.norm()) for a, b in zip(got[1:], wanted[1:], strict=True)])
    close(got[1], wanted[1])
    close(got[2], wanted[2])
    assert torch.equal(got[1], again[1])
    assert torch.equal(got[2], again[2])

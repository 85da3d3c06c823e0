"""A pool whose workers run the cuda executor: the bytes of that executor. On the CPU, where lanes run at once, and on a GPU."""

from pathlib import Path

import pytest
import torch
from small_cifar import EXACT, ON_GPU, experiment
from test_captured import Outcome, captured_on_cpu, outcome

from fedecho import Experiment
from fedecho.executors.pool import PoolExecutor
from fedecho.runs import build
from fedecho.runs.build import Execution, Simulation, assembled, one_thread
from fedecho.runs.execution import SLOTS, visible_gpus
from fedecho.runs.on_gpu import GpuParts, MakeJobRunner


def captured_in_a_pool(one: Experiment, num_workers: int) -> Outcome:
    parts = GpuParts(one, EXACT, torch.device("cpu"))
    runtimes, layout = build.runtimes_of(one), parts.network.layout
    server = build.server_of(one, parts.network, parts.student)
    pool = PoolExecutor(
        num_workers=num_workers,
        layout=layout,
        make_trainer=MakeJobRunner(one, EXACT, "cpu"),
        wanted=build._wanted(one, runtimes),
        depth=2 * SLOTS,
    )
    try:
        transport = build._transport(one, pool, runtimes)
        return outcome(Simulation(one, server, transport, runtimes, layout, layout.named, parts.evaluate))
    finally:
        pool.close()


def same_bytes(one: Outcome, other: Outcome) -> None:
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[2], other[2])


@pytest.mark.slow
def test_two_workers_with_the_captured_program_have_the_bytes_of_one_process(data: Path) -> None:
    """FedAC: its corrections and control variates travel too. Several jobs are under way in each worker."""
    one = experiment(data, "fedac", versions=4)
    with one_thread():
        with captured_on_cpu(one) as alone:
            wanted = outcome(alone)
        same_bytes(captured_in_a_pool(one, 2), wanted)


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.parametrize("algorithm", ["fedac", "fedecho"])
@pytest.mark.parametrize("num_workers", [1, 2], ids=["one worker", "two that share a GPU"])
def test_a_pool_on_a_gpu_has_the_bytes_of_the_cuda_executor(data: Path, algorithm: str, num_workers: int) -> None:
    one = experiment(data, algorithm, versions=20)
    exact = {"precision": "fp32", "deterministic": True, "compiled": False}
    gpus = (visible_gpus()[0],) * num_workers
    with one_thread():
        with assembled(one, Execution(executor="cuda", **exact)) as alone:
            wanted = outcome(alone)
        with assembled(one, Execution(executor="pool", device="cuda", gpus=gpus, **exact)) as pooled:
            assert pooled.execution.workers == num_workers
            same_bytes(outcome(pooled), wanted)

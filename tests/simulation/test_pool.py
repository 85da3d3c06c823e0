"""Real worker processes: results are bit-identical to the serial executor, whatever happens to the workers."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_pool import shared_memory
from pool_tasks import LOCAL, MOODY, MoodyDigits, StuckDigits

from fedecho.algorithms import FedAC
from fedecho.core.loop import Moment, drive
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.executors import pool as executors_pool
from fedecho.executors.executor import Executor, Job, SerialExecutor
from fedecho.executors.pool import PoolExecutor, WorkerError
from fedecho.runs.build import MakeTrainer
from fedecho.simulation.forecast import forecast
from fedecho.simulation.runtimes import Runtimes
from fedecho.simulation.transport import VirtualTransport

TASK = MoodyDigits()
NUM_VERSIONS = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_trainer(**changes: Any) -> MakeTrainer:
    return MakeTrainer(replace(TASK, **changes), LOCAL, seed=0)


def children() -> set[BaseProcess]:
    return set(multiprocessing.active_children())


@pytest.fixture(scope="module")
def others() -> set[BaseProcess]:
    """Child processes that are not the pool's."""
    return children()


@pytest.fixture(scope="module")
def pool(others: set[BaseProcess]) -> Iterator[PoolExecutor]:
    """One worker for the tests that give it jobs by hand. It must leave nothing behind."""
    memory = shared_memory()
    one = PoolExecutor(num_workers=1, layout=make_trainer()().network.layout, make_trainer=make_trainer())
    yield one
    one.submit(job(999, 0), 0.0)
    assert shared_memory() > memory
    one.close()
    assert not shared_memory() - memory
    assert children() == others


def model(version: int, *, with_correction: bool = True) -> GlobalModel:
    network = make_trainer()().network
    noise = torch.randn(network.layout.num_params, generator=torch.Generator().manual_seed(version))
    weights = Weights(network.weights.params + 0.01 * noise, network.weights.buffers.clone())
    return GlobalModel(version, weights, 0.1 * noise.flip(0) if with_correction else None)


def job(number: int, client: int, version: int = 0, control: Any = None, **options: Any) -> Job:
    return Job(Dispatch(number, client, model(version, **options), seed=number), control)


def assert_same(one: ClientUpdate, other: ClientUpdate) -> None:
    assert (one.client, one.base_version, one.num_examples, one.num_steps) == (
        other.client,
        other.base_version,
        other.num_examples,
        other.num_steps,
    )
    assert one.metrics == other.metrics
    assert torch.equal(one.delta, other.delta)
    assert torch.equal(one.buffers, other.buffers)
    assert torch.equal(one.correction, other.correction)


def test_one_workers_updates_are_bit_equal_to_serial(pool: PoolExecutor) -> None:
    """Several versions and clients, with and without a control variate and a correction, asked for out of order."""
    control = 0.03 * torch.ones_like(model(0).weights.params)
    jobs = [
        job(0, 0),
        job(1, 1, version=1),
        job(2, 0, version=2, control=control),
        job(3, 2, version=1),
        job(4, 5, version=3, control=-control, with_correction=False),
    ]
    trainer = make_trainer()()
    for each in jobs:
        pool.submit(each, float(-each.dispatch.number))
    for number in (4, 0, 2, 1, 3):
        assert_same(pool.result(number), trainer.train(jobs[number].dispatch, jobs[number].control))


def test_a_training_error_names_the_client_and_the_worker_continues(pool: PoolExecutor) -> None:
    before = children()
    pool.submit(job(10, MOODY), 0.0)
    pool.submit(job(11, 4), 1.0)
    with pytest.raises(WorkerError, match=rf"training of client {MOODY} failed: not today") as caught:
        pool.result(10)
    assert "\n" not in str(caught.value)
    assert "ZeroDivisionError: not today" in caught.value.__notes__[0]
    assert_same(pool.result(11), make_trainer()().train(job(11, 4).dispatch))
    assert children() == before


def test_cancelled_jobs_are_discarded(pool: PoolExecutor) -> None:
    for number in range(20, 26):
        pool.submit(job(number, number % 3), float(number))
    for number in (20, 22, 25):
        pool.cancel(number)
    trainer = make_trainer()()
    for number in (21, 23, 24):
        assert_same(pool.result(number), trainer.train(job(number, number % 3).dispatch))
    for number in (20, 22, 25):
        with pytest.raises(KeyError, match="never submitted"):
            pool.result(number)


def test_a_worker_killed_at_work_is_replaced_and_nothing_changes(pool: PoolExecutor, others: set[BaseProcess]) -> None:
    (worker,) = children() - others
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)  # or a quick worker would be done before it is killed
    for number in (30, 31):
        pool.submit(job(number, number % 3), float(number))
    os.kill(worker.pid, signal.SIGKILL)
    trainer = make_trainer()()
    for number in (30, 31):
        assert_same(pool.result(number), trainer.train(job(number, number % 3).dispatch))
    (replacement,) = children() - others
    assert replacement != worker


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes in /proc")
def test_a_worker_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool closes even if its workers are stuck and ignore SIGTERM."""
    monkeypatch.setattr(executors_pool, "GRACE_S", 0.2)
    before = children()
    make = MakeTrainer(StuckDigits(), LOCAL, seed=0)
    stuck = PoolExecutor(num_workers=2, layout=make().network.layout, make_trainer=make)
    for number in range(2):
        stuck.submit(job(number, MOODY), 0.0)
    processes = children() - before
    ignores = 1 << (signal.SIGTERM - 1)
    while not all(int(status_of(process.pid or 0)["SigIgn"], 16) & ignores for process in processes):
        time.sleep(0.01)
    stuck.close()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


class Federation:
    """A FedAC run over the digits; its clients remember control variates from job to job."""

    def __init__(self) -> None:
        sizes = [TASK.num_examples(client) for client in range(TASK.num_clients)]
        self.runtimes = Runtimes(long_share=0.2).assign(sizes, seed=0)
        self.make_trainer = make_trainer(moody=-1)
        self.algorithm = FedAC(buffer_size=2, num_clients=TASK.num_clients, server_lr=0.01)

    def transport(self, executor: Executor) -> VirtualTransport:
        return VirtualTransport(executor=executor, runtimes=self.runtimes, num_clients=TASK.num_clients, seed=0)

    def wanted(self) -> frozenset[int]:
        return forecast(
            buffer_size=2,
            demands=self.algorithm.demands,
            num_clients=TASK.num_clients,
            concurrency=4,
            seed=0,
            num_versions=NUM_VERSIONS,
            dispatch_after_step=False,
            make_transport=self.transport,
        ).answered

    def run(self, executor: Executor, watch: Any = lambda moment: None) -> tuple[list[bytes], Server[Any]]:
        network, models = self.make_trainer().network, []
        start = GlobalModel(0, network.layout.pack(network.module))
        server = Server(algorithm=self.algorithm, model=start, num_clients=TASK.num_clients, concurrency=4, seed=0)

        def note(moment: Moment) -> None:
            watch(moment)
            if moment.step is not None:
                made = moment.step.model
                tensors = (made.weights.params, made.weights.buffers, made.correction)
                models.append(b"".join(tensor.numpy().tobytes() for tensor in tensors))

        drive(server, self.transport(executor), num_versions=NUM_VERSIONS, watch=note)
        return models, server


def test_two_workers_of_which_one_is_killed_match_serial_bit_for_bit() -> None:
    """Bit for bit; and nothing is trained that falls past the end of the run."""
    federation = Federation()
    trainer = federation.make_trainer()
    expected, reference = federation.run(SerialExecutor(lambda each: trainer.train(each.dispatch, each.control)))
    wanted, memory, before = federation.wanted(), shared_memory(), children()
    pool = PoolExecutor(num_workers=2, layout=trainer.network.layout, make_trainer=federation.make_trainer, wanted=wanted)
    victims: list[BaseProcess] = []

    def kill_once(moment: Moment) -> None:
        if moment.step is not None and not victims:
            victims.append(min(children() - before, key=lambda worker: worker.pid or 0))
            victims[0].kill()
            victims[0].join()

    try:
        models, server = federation.run(pool, kill_once)
    finally:
        in_use = shared_memory()
        pool.close()
    assert models == expected
    assert victims
    assert server.num_dispatched == reference.num_dispatched > len(wanted)
    assert pool.num_trained == len(wanted) == 2 * NUM_VERSIONS
    assert in_use > memory
    assert not shared_memory() - memory

"""A real Ray cluster on this machine with two workers: results are bit-identical to the serial executor."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from pool_tasks import MOODY
from test_pool import NUM_VERSIONS, Federation, assert_same, job, make_trainer, model

from fedecho import load, simulate
from fedecho.core.loop import Moment
from fedecho.executors.executor import SerialExecutor
from fedecho.executors.ray_address import ENVIRONMENT, check_ray
from fedecho.executors.worker_pool import MAX_LOSSES, WorkerError

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
ray = pytest.importorskip("ray", reason="needs Ray: pip install 'fedecho[ray]'")
# Ray leaves files and processes for the garbage collector to close.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    """One Ray cluster for all tests here, connected as by a user's own program: runs use it and leave it open."""
    check_ray()
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    assert ray.is_initialized()
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)
    gc.collect()


def ray_executor(cluster: Any, **options: Any) -> Any:
    from fedecho.executors.ray_executor import RayExecutor

    return RayExecutor(cluster=cluster, **options)


def executor(**options: Any) -> Any:
    from fedecho.executors.ray_cluster import Cluster

    return ray_executor(Cluster(None, options.pop("workers", 2), gpu=False), **options)


def test_a_run_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    simulate(load("digits", algorithm="fedbuff", versions=1), executor="ray", workers=1)
    assert dict(os.environ) == before


@pytest.mark.parametrize("algorithm", ["fedecho", "ca2fl"])
def test_ray_is_bit_identical_to_serial(algorithm: str) -> None:
    small = ["task.width=2", "task.num_unlabeled=30"]
    experiment = load("digits", algorithm=algorithm, versions=12, settings=small)
    here, there = simulate(experiment).summary, simulate(experiment, executor="ray", workers=2).summary
    assert (there.model_sha256, there.arrivals_sha256) == (here.model_sha256, here.arrivals_sha256)


def test_a_worker_killed_in_mid_run_changes_nothing_and_every_version_is_stored_once() -> None:
    """FedAC, whose corrections and control variates travel too."""
    federation, said = Federation(), []
    trainer = federation.make_trainer()
    expected, reference = federation.run(SerialExecutor(lambda each: trainer.train(each.dispatch, each.control)))
    wanted = federation.wanted()
    runner = executor(make_trainer=federation.make_trainer, wanted=wanted, say=said.append)
    victims: list[int] = []
    bases: set[int] = set()

    def kill_once(moment: Moment) -> None:
        bases.add(moment.receipt.base_version)
        busy = [worker for worker in runner._ready() if worker.orders]
        if moment.step is not None and busy and not victims:
            victims.append(busy[0].info.process)
            os.kill(victims[0], signal.SIGKILL)

    try:
        models, server = federation.run(runner, kill_once)
        assert len(runner._models) <= server.versions.num_alive, "a version nobody holds is not stored either"
    finally:
        runner.close()
    assert victims
    assert any("lost a worker on " in line for line in said)
    assert models == expected
    assert runner.num_trained == len(wanted) == 2 * NUM_VERSIONS
    assert runner.num_stored == len(bases) > 1, "once for each version that is trained from"
    assert reference.num_dispatched == server.num_dispatched


@dataclass
class Promised:
    """A cluster with fewer resources than it reports."""

    num_workers: int
    resource: str = "CPU"

    def close(self) -> None:
        pass

    def check_head(self) -> None:
        pass


def test_a_worker_without_resources_waits_while_others_work() -> None:
    runner = ray_executor(Promised(3), make_trainer=make_trainer())
    try:
        for number in range(6):
            runner.submit(job(number, 4), float(number))
        trainer = make_trainer()()
        for number in range(6):
            assert_same(runner.result(number), trainer.train(job(number, 4).dispatch))
        assert len(runner._ready()) <= 2 < runner.num_workers
    finally:
        runner.close()


def test_a_gpu_worker_gets_many_jobs_at_once_and_waiting_for_a_gpu_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that only Ray believes in: its worker starts all its jobs before the first result is requested."""
    from fedecho.executors import ray_executor as module
    from fedecho.executors.ray_cluster import Cluster

    runner, said = ray_executor(Cluster(None, 1, gpu=True), make_trainer=make_trainer(), depth=8), []
    control = 0.03 * model(0).weights.params
    try:
        jobs = [job(number, number % 3, version=number % 2, control=control) for number in range(10)]
        for each in jobs:
            runner.submit(each, float(each.dispatch.number))
        assert len(runner._workers[0].unfetched) == 8
        assert not runner._workers[0].fetching
        trainer = make_trainer()()
        for each in jobs:
            assert_same(runner.result(each.dispatch.number), trainer.train(each.dispatch, each.control))
        monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.1)
        monkeypatch.setattr(module, "REPORT_INTERVAL_S", 0.1)
        monkeypatch.setattr(module, "PATIENCE_S", 0.3)
        with pytest.raises(
            WorkerError, match=r"the Ray cluster \(1 nodes\) has had no resources for a worker for 0 s; .* resume the run"
        ):
            ray_executor(Promised(1, "GPU"), make_trainer=make_trainer(), say=said.append)
    finally:
        runner.close()
    assert said == ["the Ray cluster (1 nodes) has had no resources for a worker for 0 s; waiting"] * 2


def test_a_version_mismatch_of_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedecho.executors import ray_cluster as cluster

    def refuse(**options: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ValueError, match=r"runs another version; .* The cluster was started with: Ray: 2.9.0 Python: 3.9.1"):
        cluster._join("auto")


def test_a_node_with_other_software_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedecho.executors import ray_executor as module

    monkeypatch.setattr(module, "software", lambda: {"torch": "1.0"})
    with pytest.raises(
        WorkerError, match=r"the Ray node \S+ has torch \S+ instead of 1.0: install the same software on every node"
    ):
        executor(make_trainer=make_trainer(), workers=1)


def test_a_failure_names_the_client_and_too_many_workers_are_rejected() -> None:
    runner = executor(make_trainer=make_trainer(), workers=1)
    try:
        runner.submit(job(0, MOODY), 0.0)
        runner.submit(job(1, 4), 1.0)
        runner.submit(job(2, 0), 2.0)
        runner.cancel(2)
        with pytest.raises(WorkerError, match=rf"training of client {MOODY} failed: not today"):
            runner.result(0)
        assert_same(runner.result(1), make_trainer()().train(job(1, 4).dispatch))
    finally:
        runner.close()
    with pytest.raises(ValueError, match=r"the Ray cluster has 2 CPUs in total, too few for --workers 3"):
        executor(make_trainer=make_trainer(), workers=3)


def test_a_lost_head_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedecho.executors import ray_cluster as module

    runner = executor(make_trainer=make_trainer(), workers=1)
    try:
        runner.submit(job(0, 0), 0.0)
        clock, head, cluster = [time.monotonic()], runner._cluster._head, runner._cluster
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        for gone, waited in ((True, 100.0), (True, 15.0), (False, 4.0), (False, 6.0), (True, 6.0), (True, 12.0)):
            cluster._head = "127.0.0.1:1" if gone else head
            clock[0] += waited
            cluster.check_head()  # after a while in which nobody looked; too soon to be seen; away for less than twenty seconds
        clock[0] += 6.0
        with pytest.raises(WorkerError, match=r"lost the head of the Ray cluster at 127.0.0.1:1; resume the run from"):
            runner.result(0)
    finally:
        runner.close()


class Lost(ray.exceptions.RayError):
    """A simulated loss of an actor."""

    actor_init_failed = False


class Unable(Lost):
    actor_init_failed = True


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor whose only actor is simulated by the test."""
    from fedecho.executors import ray_executor as module

    handle = SimpleNamespace(run=SimpleNamespace(remote=lambda *order: object()))
    monkeypatch.setattr(module, "_kill", lambda worker: None)
    monkeypatch.setattr(module.RayExecutor, "_start_worker", lambda self: module._Worker(handle, None))
    return ray_executor(Promised(1), make_trainer=make_trainer())


def test_a_job_that_loses_every_worker_ends_the_run(simulated: Any) -> None:
    simulated.submit(job(0, 5), 0.0)
    for _ in range(MAX_LOSSES):
        simulated._replace(simulated._workers[0], Lost("killed by the kernel\nat length"))
        simulated._pump()
        assert simulated._workers[0].load == 1
    with pytest.raises(WorkerError, match=r"4 workers died while training client 5; out of memory\? \(killed by the kernel\)$"):
        simulated._replace(simulated._workers[0], Lost("killed by the kernel\nat length"))


def test_a_working_worker_does_not_reset_the_failed_starts_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedecho.executors import ray_executor as module

    monkeypatch.setattr(module, "_kill", lambda worker: None)
    monkeypatch.setattr(module.RayExecutor, "_start_worker", lambda self: module._Worker(None, None))
    two = ray_executor(Promised(2), make_trainer=make_trainer())
    for number in range(2 * MAX_LOSSES):
        two._settle(number, None)
        two._workers[1].starting = object()
        two._replace(two._workers[1], Lost("gone"))
    two._workers[1].starting = object()
    with pytest.raises(WorkerError, match="workers keep dying before they have started: gone"):
        two._replace(two._workers[1], Lost("gone"))


def test_workers_that_never_begin_end_the_run(simulated: Any) -> None:
    for _ in range(MAX_LOSSES):
        simulated._workers[0].starting = object()
        simulated._replace(simulated._workers[0], Lost("gone"))
    simulated._workers[0].starting = object()
    with pytest.raises(WorkerError, match="workers keep dying before they have started: gone"):
        simulated._replace(simulated._workers[0], Lost("gone"))
    with pytest.raises(
        WorkerError, match=r"cannot start a worker \(No module named fedecho\): install the same software there"
    ):
        simulated._replace(simulated._workers[0], Unable("The actor died\nNo module named fedecho"))


def test_a_worker_that_cannot_start_is_reported_with_the_reason(simulated: Any) -> None:
    with pytest.raises(WorkerError, match="a worker could not start: no data here"):
        simulated._started(simulated._workers[0], "no data here")


def test_a_full_object_store_is_reported(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("1 GB in use")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(WorkerError, match=r"object store on this machine is too full for a model: .*1 GB in use"):
        simulated.submit(job(0, 5), 0.0)

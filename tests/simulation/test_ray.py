"""A real Ray on this machine, two workers: the bytes of the serial executor, whatever happens to the workers."""

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pool_tasks import MOODY
from test_pool import NUM_VERSIONS, Federation, assert_same, job, make_trainer

from fedecho import load, simulate
from fedecho.core.drive import Moment
from fedecho.simulation.executors.crew import WorkerError
from fedecho.simulation.executors.ray import ENVIRONMENT, check_ray
from fedecho.simulation.executors.serial import SerialExecutor

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
ray = pytest.importorskip("ray", reason="needs Ray: pip install 'fedecho[ray]'")
# Ray leaves files and processes for the garbage collector to close.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    """One Ray for all tests here, connected as a user's own program would be: runs use it and leave it alone."""
    check_ray()
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    assert ray.is_initialized()
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)
    gc.collect()


def ray_executor(cluster: Any, **options: Any) -> Any:
    from fedecho.simulation.executors.ray.executor import RayExecutor

    return RayExecutor(cluster=cluster, **options)


def executor(**options: Any) -> Any:
    from fedecho.simulation.executors.ray.cluster import Cluster

    return ray_executor(Cluster(None, options.pop("workers", 2), gpu=False), **options)


@pytest.mark.parametrize("algorithm", ["fedecho", "ca2fl"])
def test_ray_gives_the_bytes_of_serial(algorithm: str) -> None:
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
            victims.append(busy[0].hello.process)
            os.kill(victims[0], signal.SIGKILL)

    try:
        models, server = federation.run(runner, kill_once)
        assert len(runner._models) <= server.versions.num_alive, "a version nobody holds is not stored either"
    finally:
        runner.close()
    assert victims
    assert any("was lost: another takes its place" in line for line in said)
    assert models == expected
    assert runner.num_trained == len(wanted) == 2 * NUM_VERSIONS
    assert runner.num_stored == len(bases) > 1, "once for each version that is trained from"
    assert reference.num_dispatched == server.num_dispatched


@dataclass
class Promised:
    """A cluster that has not the room it says."""

    num_workers: int
    resource: str = "CPU"

    def close(self) -> None:
        pass


def test_who_finds_no_room_waits_while_the_others_work() -> None:
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


def test_room_that_never_comes_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedecho.simulation.executors.ray import executor as module

    said: list[str] = []
    monkeypatch.setattr(module, "TELL_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    with pytest.raises(WorkerError, match=r"no room for a worker in the Ray cluster \(1 nodes\) for 0 s; .* can be resumed"):
        ray_executor(Promised(1, "GPU"), make_trainer=make_trainer(), say=said.append)
    assert said == ["no room for a worker in the Ray cluster (1 nodes) for 0 s; waiting for one"] * 2


def test_another_version_of_ray_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedecho.simulation.executors.ray import cluster

    def refuse(**options: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ValueError, match=r"is of another version, .* The cluster was started with: Ray: 2.9.0 Python: 3.9.1"):
        cluster._join("auto")


def test_a_node_with_other_software_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedecho.simulation.executors.ray import executor as module

    monkeypatch.setattr(module, "software", lambda: {"torch": "1.0"})
    with pytest.raises(WorkerError, match=r"the Ray node \S+ has torch \S+ and not 1.0: install the same on every node"):
        executor(make_trainer=make_trainer(), workers=1)


def test_a_failure_is_told_with_the_client_and_too_many_workers_are_refused() -> None:
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
    with pytest.raises(ValueError, match=r"the Ray cluster has 2 CPUs in all, too few for --workers 3"):
        executor(make_trainer=make_trainer(), workers=3)

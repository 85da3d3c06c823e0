"""A real Ray on this machine, two workers: the bytes of the serial executor, whatever happens to the workers."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
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


def executor(**options: Any) -> Any:
    from fedecho.simulation.executors.ray.cluster import Cluster
    from fedecho.simulation.executors.ray.executor import RayExecutor

    return RayExecutor(cluster=Cluster(None, options.pop("workers", 2), gpu=False), **options)


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

    def kill_once(moment: Moment) -> None:
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
    assert runner.num_stored <= NUM_VERSIONS, "once for each version that is trained from"
    assert reference.num_dispatched == server.num_dispatched


def test_a_failure_is_told_with_the_client_and_too_many_workers_are_refused(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match=r"the Ray cluster has 2 CPUs on 1 nodes, too few for --workers 3"):
        executor(make_trainer=make_trainer(), workers=3)

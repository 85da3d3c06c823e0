"""A local cluster of two nodes, one of which is lost with its worker during a run."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from test_pool import assert_same, job, make_trainer

from fedecho import load, resume, simulate
from fedecho.executors.ray_address import ENVIRONMENT, check_ray
from fedecho.runs.summary import Summary

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
pytest.importorskip("ray", reason="needs Ray: pip install 'fedecho[ray]'")
pytestmark = [
    pytest.mark.network,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS = ["task.width=16"]
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 2}
"""By default Ray takes up to twenty seconds to find that a node is gone, and these runs would be over."""
VERSIONS = {"fedecho": 60, "fedac": 200}
"""Some seconds each, of which the node is lost in the first."""


@pytest.fixture
def two_nodes() -> Iterator[tuple[Any, Any]]:
    from ray.cluster_utils import Cluster

    check_ray()
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": SOON}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1)
    yield cluster, second
    cluster.shutdown()


def started(folder: Path, address: str, algorithm: str) -> "subprocess.Popen[str]":
    words = ["run", "digits", "--algorithm", algorithm, "--versions", str(VERSIONS[algorithm]), "--out", str(folder)]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "fedecho.cli", *words, "--executor", "ray", "--address", address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def size_of(folder: Path) -> int:
    record = folder / "run.jsonl"
    return record.stat().st_size if record.exists() else 0


def both_at_work(folder: Path, process: "subprocess.Popen[str]") -> None:
    """An actor on each node, and the run goes on. The first may be long at work before the second has begun."""
    while num_actors() < 2:
        assert process.poll() is None, "the run was over before there were two workers"
        time.sleep(0.01)
    begun = size_of(folder)
    while size_of(folder) < max(begun, 5000) + 2000:
        time.sleep(0.01)


def num_actors() -> int:
    """Actors that have answered once, by the names that Ray gives their processes."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += path.read_bytes().startswith(b"ray::Actor")
    return found


@pytest.mark.parametrize("algorithm", ["fedecho", "fedac"])
def test_a_node_lost_in_mid_run_changes_nothing(two_nodes: tuple[Any, Any], algorithm: str, tmp_path: Path) -> None:
    """The run goes on with the worker that is left."""
    cluster, second = two_nodes
    process = started(tmp_path / "run", cluster.address, algorithm)
    both_at_work(tmp_path / "run", process)
    began = time.perf_counter()
    cluster.remove_node(second, allow_graceful=False)
    said, _ = process.communicate(timeout=300)
    print(f"{time.perf_counter() - began:.1f} s from the loss of the node to the end of the run\n{said}")
    assert process.returncode == 0, said
    assert "lost a worker on " in said
    assert "Traceback" not in said
    expected = simulate(load("digits", algorithm=algorithm, versions=VERSIONS[algorithm], settings=SETTINGS)).summary
    there = Summary.read(tmp_path / "run")
    assert (there.model_sha256, there.arrivals_sha256) == (expected.model_sha256, expected.arrivals_sha256)


def test_a_worker_that_lost_its_node_is_replaced_on_the_next(two_nodes: tuple[Any, Any]) -> None:
    import ray

    from fedecho.executors.ray_cluster import Cluster
    from fedecho.executors.ray_executor import RayExecutor

    cluster, second = two_nodes
    runner = RayExecutor(cluster=Cluster(cluster.address, None, gpu=False), make_trainer=make_trainer())
    trainer, numbers = make_trainer()(), count(0, 3)

    def three_more() -> None:
        """At once, so that every worker has something to do."""
        first = next(numbers)
        for number in range(first, first + 3):
            runner.submit(job(number, 4), 0.0)
        for number in range(first, first + 3):
            assert_same(runner.result(number), trainer.train(job(number, 4).dispatch))

    def until_ready(num_workers: int) -> None:
        until = time.perf_counter() + 60
        while len(runner._ready()) != num_workers:
            assert time.perf_counter() < until
            three_more()

    try:
        until_ready(2)
        cluster.remove_node(second, allow_graceful=False)
        until_ready(1)
        cluster.add_node(num_cpus=1)
        until_ready(2)
    finally:
        runner.close()
    assert not ray.is_initialized()


def test_a_head_lost_during_a_run_is_reported_and_the_run_resumes_elsewhere(two_nodes: tuple[Any, Any], tmp_path: Path) -> None:
    cluster, _ = two_nodes
    folder, words = tmp_path / "run", ["--algorithm", "fedbuff", "--versions", "600", "--set", "task.width=16"]
    command = [sys.executable, "-m", "fedecho.cli", "run", "digits", *words, "--out", str(folder), "--checkpoint-every", "1"]
    command += ["--executor", "ray", "--address", cluster.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    both_at_work(folder, process)
    began = time.perf_counter()
    cluster.head_node.kill_gcs_server(check_alive=False)
    said, _ = process.communicate(timeout=50)  # before Ray itself ends it
    print(f"{time.perf_counter() - began:.1f} s from the loss of the head to the end of the process\n{said}")
    assert process.returncode == 1
    assert "lost the head of the Ray cluster at" in said.splitlines()[-1]
    done = resume(folder, executor="serial")
    assert (
        done.summary.model_sha256
        == simulate(load("digits", algorithm="fedbuff", versions=600, settings=SETTINGS)).summary.model_sha256
    )

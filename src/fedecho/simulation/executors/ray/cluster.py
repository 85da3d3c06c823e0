"""A Ray cluster: started on this machine or joined, quietly and without telemetry."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray

from fedecho.simulation.executors.crew import WorkerError
from fedecho.simulation.executors.ray.address import START, check_reachable

LOOK_S = 5.0
"""How often the head is looked for, at most."""
MISSED_S = 20.0
"""How long it may be away: it may be busy or start again, and after 60 s without it Ray ends this process."""
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


class Cluster:
    """Connected until it is closed. A connection that the caller's program has made itself is used and left alone."""

    def __init__(self, address: str | None, num_workers: int | None, gpu: bool) -> None:
        self.resource = "GPU" if gpu else "CPU"
        self._ours = not ray.is_initialized()
        if self._ours:
            with _our_signals():
                _join(address) if address else _start(num_workers, gpu)
        self._head, self._looked = ray.get_runtime_context().gcs_address, time.monotonic()
        self._seen = self._looked
        try:
            self.num_workers = self._fitting(num_workers)
        except ValueError:
            self.close()
            raise

    def _fitting(self, num_workers: int | None) -> int:
        """A worker for every core or GPU, or as many as were asked for if there are so many."""
        there = int(ray.cluster_resources().get(self.resource, 0))
        wanted = there if num_workers is None else num_workers
        if not 0 < wanted <= there:
            raise ValueError(
                f"the Ray cluster has {there} {self.resource}s in all, too few for --workers {max(wanted, 1)}: "
                "ask for fewer, or add nodes to it"
            )
        return wanted

    def check_head(self) -> None:
        """Is it there? Workers go on without it, but not this process; whoever waits for them asks every ``LOOK_S``."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        if now - self._looked > MISSED_S:  # nobody asked for a while: how long it has been away is not known
            self._seen = now
        self._looked = now
        with suppress(ValueError):
            check_reachable(self._head)
            self._seen = now
        if now - self._seen >= MISSED_S:
            raise WorkerError(
                f"the head of the Ray cluster at {self._head} is gone; "
                "the run resumes from its last checkpoint, with --executor serial or pool too"
            )

    def close(self) -> None:
        if self._ours and ray.is_initialized():
            ray.shutdown()


def alive_nodes() -> list[str]:
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _start(num_workers: int | None, gpu: bool) -> None:
    """A cluster of this machine that ends with this process."""
    ray.init(address="local", num_cpus=num_workers or os.cpu_count() or 1, num_gpus=None if gpu else 0, **QUIET)


def _join(address: str) -> None:
    if address != "auto":
        check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster at --address {address}: {START} ({_first_line(error)})") from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        told = " ".join(str(error).split())
        raise ValueError(
            f"the Ray cluster at {address} is of another version, install the same here and there: {told}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _our_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself, for good; it is given back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""A Ray cluster (extra ``[ray]``): its address, starting one on this machine or joining one."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import ray

from fedecho.executors.worker_pool import WorkerError

__all__ = ["check_address", "check_ray", "ray_settings"]

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future way; Ray warns of its present one
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # no line of Ray's own into our output; a lost worker is told in our words
}


def check_ray() -> None:
    """Raise if Ray is not installed."""
    if sys.modules.get("ray", ...) is None or find_spec("ray") is None:
        raise ValueError("--executor ray needs Ray: pip install 'fedecho[ray]'")


@contextmanager
def ray_settings() -> Iterator[None]:
    """Environment variables that Ray reads when it is imported and when a cluster is started or joined. They are put back after."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


TRY_S = 5.0
START = "start one with `ray start --head --disable-usage-stats`, or leave --address out to use this machine alone"


def check_address(address: str | None) -> None:
    """Is this the address of a cluster that this process can be part of?"""
    if address in (None, "auto"):
        return
    if not isinstance(address, str) or "://" in address:
        raise ValueError(
            f"--address must be auto or HOST:PORT, got {address!r}; a run is part of the cluster: start it on one of its nodes"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--address must be auto or HOST:PORT (Ray's own port is 6379), got {address!r}")


def check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TRY_S).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster at --address {address} ({error}): {START}") from None


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

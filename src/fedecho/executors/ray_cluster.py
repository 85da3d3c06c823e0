"""Start a Ray cluster on this machine or join a running one (needs the ``[ray]`` extra)."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray

from fedecho.executors.ray_address import START, check_reachable
from fedecho.executors.worker_pool import WorkerError

CHECK_INTERVAL_S = 5.0
"""Least time between two checks of the head node."""
HEAD_TIMEOUT_S = 20.0
"""How long the head may be unreachable. It may be busy or restarting; after 60 s Ray itself would end this process."""
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


class Cluster:
    """A connection to a Ray cluster. If the caller's program is already connected, that connection is used and left open."""

    def __init__(self, address: str | None, num_workers: int | None, gpu: bool) -> None:
        self.resource = "GPU" if gpu else "CPU"
        self._ours = not ray.is_initialized()
        if self._ours:
            with _sigterm_kept():
                _join(address) if address else _start(num_workers, gpu)
        self._head, self._checked = ray.get_runtime_context().gcs_address, time.monotonic()
        self._seen = self._checked
        try:
            self.num_workers = self._checked_num_workers(num_workers)
        except ValueError:
            self.close()
            raise

    def _checked_num_workers(self, num_workers: int | None) -> int:
        """Return the requested number of workers, by default one per core or GPU; raise if the cluster is too small."""
        available = int(ray.cluster_resources().get(self.resource, 0))
        wanted = available if num_workers is None else num_workers
        if not 0 < wanted <= available:
            raise ValueError(
                f"the Ray cluster has {available} {self.resource}s in total, too few for --workers {max(wanted, 1)}: "
                "lower --workers or add nodes"
            )
        return wanted

    def check_head(self) -> None:
        """Raise if the head node has been unreachable for too long: workers survive without it, this process does not."""
        now = time.monotonic()
        if now - self._checked < CHECK_INTERVAL_S:
            return
        if now - self._checked > HEAD_TIMEOUT_S:  # no recent check, so we cannot tell how long it has been unreachable
            self._seen = now
        self._checked = now
        with suppress(ValueError):
            check_reachable(self._head)
            self._seen = now
        if now - self._seen >= HEAD_TIMEOUT_S:
            raise WorkerError(
                f"lost the head of the Ray cluster at {self._head}; "
                "resume the run from its last checkpoint (--executor serial or pool also works)"
            )

    def close(self) -> None:
        if self._ours and ray.is_initialized():
            ray.shutdown()


def alive_nodes() -> list[str]:
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _start(num_workers: int | None, gpu: bool) -> None:
    """Start a cluster on this machine that ends with this process."""
    ray.init(address="local", num_cpus=num_workers or os.cpu_count() or 1, num_gpus=None if gpu else 0, **QUIET)


def _join(address: str) -> None:
    if address != "auto":
        check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"no Ray cluster at --address {address}: {START} ({reason})") from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the Ray cluster at {address} runs another version; install the same version on both sides: {reason}"
        ) from None


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore our SIGTERM handler, which Ray replaces for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

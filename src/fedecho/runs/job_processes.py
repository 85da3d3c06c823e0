"""Runs jobs in parallel processes. Progress, stop requests and errors pass through one pipe per process."""

import multiprocessing
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Any, Generic, TypeVar

from fedecho.executors.worker_pool import WorkerError
from fedecho.runs.run import Interrupted
from fedecho.runs.run_stats import RunState
from fedecho.runs.signals import STOP_SIGNALS, Stop, ignore_stop_signals, memory_shortage, stop_signals

Say = Callable[[str], None]
Report = Callable[[RunState], None]
STATE, TEXT, DONE, FAILED = "state", "text", "done", "failed"
"""Kinds of messages from a job process: its run's state, a text, the result, or an error with its traceback."""
Message = tuple[str, Any]
STATE_EVERY_S = 0.2


def serve(pipe: Connection) -> None:
    """Run one job after another. Anything received during a job, even the end of the pipe, is a stop request."""
    ignore_stop_signals()
    sending = threading.Lock()

    def send(message: Message) -> None:
        with sending:  # tracking sinks send from their own threads
            pipe.send(message)

    with pipe, suppress(EOFError, OSError):
        while job := pipe.recv_bytes():
            send(run_job(job, send, pipe.poll))


def run_job(job: bytes, send: Callable[[Message], None], stop: Stop) -> Message:
    """Run a pickled job and return its result or error as a message. Until then, progress goes to ``send``."""
    sent_at, over = 0.0, False

    def send_while_running(kind: str, content: Any) -> None:
        if not over:
            with suppress(OSError):  # the parent process may be gone
                send((kind, content))

    def report(state: RunState) -> None:
        nonlocal sent_at
        now = time.monotonic()
        if now - sent_at > STATE_EVERY_S or state.done:
            sent_at = now
            send_while_running(STATE, state)

    try:
        return DONE, pickle.loads(job)(report, partial(send_while_running, TEXT), stop)  # noqa: S301 (from our parent process)
    except BaseException as error:
        return FAILED, _portable(error)
    finally:
        over = True


class RemoteTracebackError(Exception):
    """The traceback of an error in a job process. Set as the cause of the error."""


def _portable(error: BaseException) -> tuple[BaseException, RemoteTracebackError]:
    """The error and its traceback. An error that cannot be pickled becomes a ``RuntimeError`` with the same text."""
    where = RemoteTracebackError("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (ours)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), where
    return error, where


See = Callable[[str, RunState], None]
T = TypeVar("T")
Work = Callable[[Report, Say, Stop], T]
"""A job. It sends its state and its texts, and ends with ``Interrupted`` soon after a stop was requested."""
ADVICE = "run the same command again to continue"
POLL_EVERY_S = 0.2
EXIT_TIMEOUT_S = 10.0
STOP = b""
"""In place of a job: exit, or stop the job that is running."""


def run_jobs(works: Mapping[str, Work[T]], *, jobs: int, see: See, say: Say) -> dict[str, T]:
    """Run all functions of ``works``, ``jobs`` at a time. ``see`` receives states by label, ``say`` texts.

    If one fails, the others are stopped and can be resumed later. One that runs out of memory is put back in the queue, and one
    process fewer continues.
    """
    pool = _JobPool(works, see, say)
    try:
        with stop_signals(say) as stop_requested:
            pool.start(min(jobs, len(works)))
            pool.run(stop_requested)
    finally:
        pool.shut_down()
    if pool.error is not None:
        raise pool.error
    return {label: pool.done[label] for label in works}


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    label: str = ""
    """The current job."""
    alone: bool = False
    """Was it the only worker when that job began?"""

    def send(self, job: bytes) -> None:
        with suppress(OSError):  # the process has ended: the main loop will see the end of its pipe
            self.pipe.send_bytes(job)

    def end(self, timeout_s: float) -> None:
        self.process.join(timeout_s)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _JobPool(Generic[T]):
    def __init__(self, works: Mapping[str, Work[T]], see: See, say: Say) -> None:
        self.works, self.see, self.say = works, see, say
        self.queue = deque(works)
        self.workers: list[_Worker] = []
        self.exiting: list[_Worker] = []
        self.done: dict[str, T] = {}
        self.error: BaseException | None = None

    def start(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        with _signals_blocked():
            for _ in range(number):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs,))
                process.start()
                theirs.close()
                self.workers.append(_Worker(process, ours))
        for worker in self.workers:
            self._assign(worker)

    def run(self, stop_requested: Stop) -> None:
        """Process messages until all workers have ended. A stopped worker still sends its last messages."""
        while self.workers:
            if stop_requested() and self.error is None:
                self._stop(Interrupted(f"stopped; {ADVICE}"))
            ready = wait([worker.pipe for worker in self.workers], POLL_EVERY_S)
            for worker in [worker for worker in self.workers if worker.pipe in ready]:
                self._receive(worker)
            if self.queue and not self.workers and self.error is None:  # the last workers ran out of memory together
                self.start(1)

    def shut_down(self) -> None:
        """End all workers. Those still running (after a second stop request or an error here) are killed at once."""
        for worker in self.workers:
            worker.end(0)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for worker in self.exiting:
            worker.end(max(deadline - time.monotonic(), 0))

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return
        if kind == STATE:
            self.see(worker.label, content)
        elif kind == TEXT:
            self.say(f"{worker.label}: {content}")
        elif kind == DONE:
            self.done[worker.label] = content
            self._assign(worker)
        else:
            self._failed(worker, *content)

    def _failed(self, worker: _Worker, error: BaseException, where: BaseException) -> None:
        error.__cause__ = where
        if memory_shortage(error):
            self._put_back(worker, error)
            self._retire(worker)
        else:
            self._stop(error)
            self._assign(worker)

    def _assign(self, worker: _Worker) -> None:
        """Send the next job. If there is none, the worker exits and its pipe ends."""
        worker.label = self.queue.popleft() if self.queue and self.error is None else ""
        worker.alone = len(self.workers) == 1
        worker.send(pickle.dumps(self.works[worker.label]) if worker.label else STOP)

    def _ended(self, worker: _Worker) -> None:
        """Handle the end of a worker's pipe: a normal exit, or a crash if it still had a job."""
        self.workers.remove(worker)
        if not worker.label:
            self.exiting.append(worker)
            return
        worker.end(EXIT_TIMEOUT_S)
        code = worker.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        crash = WorkerError(f"{worker.label}: its process ended unexpectedly ({how}); {ADVICE}")
        if code == -signal.SIGKILL:  # the kernel's out-of-memory killer sends SIGKILL
            self._put_back(worker, crash)
        else:
            self._stop(crash)

    def _put_back(self, worker: _Worker, error: BaseException) -> None:
        """Queue a job again that ran out of memory. If it ran alone, it would only fail again: stop."""
        if self.error is None and not worker.alone:
            fewer = sum(bool(other.label) for other in self.workers if other is not worker)
            why = memory_shortage(error) or "its process was killed, possibly out of memory"
            self.say(f"{worker.label}: {why}: will retry with {max(fewer, 1)} at a time")
            self.queue.append(worker.label)
        else:
            self._stop(error)

    def _retire(self, worker: _Worker) -> None:
        """End a worker and wait for it, so that its memory is free."""
        worker.send(STOP)
        worker.end(EXIT_TIMEOUT_S)
        self.workers.remove(worker)

    def _stop(self, error: BaseException) -> None:
        """Stop all workers. The first error is the one that is raised."""
        if self.error is None:
            self.error = error
        for worker in self.workers:
            worker.send(STOP)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block stop signals while processes start, until they have installed their handlers. Signals received here are delayed."""
    ensure_running()  # otherwise it would start with the first process and unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Runs in processes of their own, a pipe each: progress, stop requests and errors pass through it."""

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
from fedecho.runs.signals import LED, be_led, shortage, stop_signals

Say = Callable[[str], None]
Tell = Callable[[RunState], None]
News = tuple[str, Any]
"""That it "stands" so, "says" a word, "has done" its work with a result, or "has failed" with an error and where that was."""
NEWS_EVERY_S = 0.2


def serve(pipe: Connection) -> None:
    """One piece of work after the other. While at work nothing comes but a stop, or the end of the pipe, which is one too."""
    be_led(pipe.poll)
    sending = threading.Lock()

    def send(news: News) -> None:
        with sending:  # sinks speak in threads of their own
            pipe.send(news)

    with pipe, suppress(EOFError, OSError):
        while order := pipe.recv_bytes():
            send(outcome(order, send))


def outcome(order: bytes, send: Callable[[News], None]) -> News:
    """What came of it; until then ``send`` has the news."""
    told, over = 0.0, False

    def news(kind: str, what: Any) -> None:
        if not over:
            with suppress(OSError):  # who leads may be gone
                send((kind, what))

    def tell(state: RunState) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > NEWS_EVERY_S or state.done:
            told = now
            news("stands", state)

    try:
        return "has done", pickle.loads(order)(tell, partial(news, "says"))  # noqa: S301 (our leader's)
    except BaseException as error:
        return "has failed", _portable(error)
    finally:
        over = True


class ElsewhereError(Exception):
    """Where in its process an error was raised: what a reader of a traceback wants to see beside it."""


def _portable(error: BaseException) -> tuple[BaseException, ElsewhereError]:
    """In other words if it does not travel as it is."""
    where = ElsewhereError("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (ours)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), where
    return error, where


See = Callable[[str, RunState], None]
T = TypeVar("T")
GO_ON = "the same command goes on where it was"
LOOK_EVERY_S = 0.2
LEAVES_IN_S = 10.0
NOTHING = b""
"""No order: the end, or at work a request to stop."""


def beside(works: Mapping[str, Callable[[Tell, Say], T]], *, jobs: int, see: See, say: Say) -> dict[str, T]:
    """Do all the work, ``jobs`` at a time. What each tells and says is passed on by its label.

    The first that fails ends the others, in good order: they can go on later. What finds too little memory beside the others is
    put back, and one process fewer goes on.
    """
    crowd = _Crowd(works, see, say)
    try:
        with stop_signals(say) as asked:
            crowd.hire(min(jobs, len(works)))
            crowd.work(asked)
    finally:
        crowd.dismiss()
    if crowd.error is not None:
        raise crowd.error
    return {label: crowd.done[label] for label in works}


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    label: str = ""
    """What it works on."""
    alone: bool = False
    """It was, when it took that."""

    def send(self, order: bytes) -> None:
        with suppress(OSError):  # it has ended; its pipe will tell
            self.pipe.send_bytes(order)

    def leave(self, within_s: float) -> None:
        self.process.join(within_s)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Crowd(Generic[T]):
    def __init__(self, works: Mapping[str, Callable[[Tell, Say], T]], see: See, say: Say) -> None:
        self.works, self.see, self.say = works, see, say
        self.left = deque(works)
        self.workers: list[_Worker] = []
        self.leaving: list[_Worker] = []
        self.done: dict[str, T] = {}
        self.error: BaseException | None = None

    def hire(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        with _born_deaf():
            for _ in range(number):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs,))
                process.start()
                theirs.close()
                self.workers.append(_Worker(process, ours))
        for worker in self.workers:
            self._give(worker)

    def work(self, asked: Callable[[], bool]) -> None:
        """Until everybody has ended: what was asked to stop still has something to say."""
        while self.workers:
            if asked() and self.error is None:
                self._end(Interrupted(f"stopped; {GO_ON}"))
            ready = wait([worker.pipe for worker in self.workers], LOOK_EVERY_S)
            for worker in [worker for worker in self.workers if worker.pipe in ready]:
                self._hear(worker)
            if self.left and not self.workers and self.error is None:  # all that were left found too little memory at once
                self.hire(1)

    def dismiss(self) -> None:
        """Whoever is still at work, asked twice to stop or because of an error here, ends at once."""
        for worker in self.workers:
            worker.leave(0)
        until = time.monotonic() + LEAVES_IN_S
        for worker in self.leaving:
            worker.leave(max(until - time.monotonic(), 0))

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, told = worker.pipe.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        if kind == "stands":
            self.see(worker.label, told)
        elif kind == "says":
            self.say(f"{worker.label}: {told}")
        elif kind == "has done":
            self.done[worker.label] = told
            self._give(worker)
        else:
            self._fail(worker, *told)

    def _fail(self, worker: _Worker, error: BaseException, where: BaseException) -> None:
        error.__cause__ = where
        if shortage(error):
            self._put_back(worker, error)
            self._retire(worker)
        else:
            self._end(error)
            self._give(worker)

    def _give(self, worker: _Worker) -> None:
        """The next piece of work, or none: then the worker ends, and its pipe with it."""
        worker.label = self.left.popleft() if self.left and self.error is None else ""
        worker.alone = len(self.workers) == 1
        worker.send(pickle.dumps(self.works[worker.label]) if worker.label else NOTHING)

    def _lose(self, worker: _Worker) -> None:
        """Its pipe has ended."""
        self.workers.remove(worker)
        if not worker.label:
            self.leaving.append(worker)
            return
        worker.leave(LEAVES_IN_S)
        code = worker.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lost = WorkerError(f"{worker.label}: its process ended without a word ({how}); {GO_ON}")
        if code == -signal.SIGKILL:  # what a system does that has no memory left
            self._put_back(worker, lost)
        else:
            self._end(lost)

    def _put_back(self, worker: _Worker, error: BaseException) -> None:
        """What it found too little memory for is tried again when others have ended; alone it would only fail again."""
        if self.error is None and not worker.alone:
            fewer = sum(bool(other.label) for other in self.workers if other is not worker)
            why = shortage(error) or "its process was killed, for want of memory perhaps"
            self.say(f"{worker.label}: {why}: it is put back, and {max(fewer, 1)} at a time go on")
            self.left.append(worker.label)
        else:
            self._end(error)

    def _retire(self, worker: _Worker) -> None:
        """One that does not work any more is waited for: only then has it given back what it holds."""
        worker.send(NOTHING)
        worker.leave(LEAVES_IN_S)
        self.workers.remove(worker)

    def _end(self, error: BaseException) -> None:
        """All that work are told to stop. What is told of first is why."""
        if self.error is None:
            self.error = error
        for worker in self.workers:
            worker.send(NOTHING)


@contextmanager
def _born_deaf() -> Iterator[None]:
    """Processes started inside hear of no signal before they know what to do with it; what comes here meanwhile comes after."""
    ensure_running()  # it would start with the first process, and take the mask away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

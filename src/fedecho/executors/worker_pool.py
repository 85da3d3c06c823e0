"""Scheduling shared by the process pool and the Ray executor: workers get jobs in the order they are due."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Set
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

from fedecho.core.types import ClientUpdate
from fedecho.executors.executor import Job
from fedecho.executors.worker import Failed

DEPTH = 2
"""Orders a worker holds at once, so that it keeps training while this process distils."""
AHEAD = 4
"""Default number of results per worker that may wait until they are due; doubled if a job is due earlier. This bounds memory."""

MAX_LOSSES = 3
"""Workers one job may lose, and consecutive failed starts allowed per worker, before the run is aborted."""


class WorkerError(RuntimeError):
    """Workers kept dying, or a client's training failed."""

    @classmethod
    def from_worker(cls, what: str, text: str) -> "WorkerError":
        """Build the error from a worker's ``error_text``; its traceback becomes a note rather than part of the message."""
        line, _, trace = text.partition("\n")
        error = cls(f"{what}: {line}")
        if trace:
            error.add_note(f"in the worker:\n{trace}")
        return error


class Worker(Protocol):
    """A worker with a known load."""

    @property
    def load(self) -> int:
        """Number of orders the worker holds."""


W = TypeVar("W", bound=Worker)


class WorkerPool(ABC, Generic[W]):
    """An executor that distributes jobs over workers. Jobs not in ``wanted`` start only when their result is requested."""

    def __init__(self, *, num_workers: int, wanted: Set[int] | None = None, depth: int = DEPTH) -> None:
        if num_workers < 1:
            raise ValueError(f"workers must be at least 1, got {num_workers}")
        self._wanted = wanted
        self._depth = depth
        self._ahead = AHEAD * depth // DEPTH
        self._jobs: dict[int, Job] = {}
        self._pending: list[tuple[float, int]] = []
        self._dues: dict[int, float] = {}
        self._results: dict[int, ClientUpdate | Failed] = {}
        self._running: set[int] = set()
        self._cancelled: set[int] = set()
        self._losses: Counter[int] = Counter()
        self._false_starts = 0
        """Consecutive workers lost during start-up."""
        self._workers: list[W] = []
        self.num_trained = 0

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @abstractmethod
    def _order(self, worker: W, job: Job) -> None:
        """Send a worker its next job. Returns at once."""

    @abstractmethod
    def _collect(self) -> None:
        """Wait until a worker answers or dies, then ``_settle`` or ``_put_back`` each affected job."""

    @abstractmethod
    def close(self) -> None: ...

    def submit(self, job: Job, due: float) -> None:
        number = job.dispatch.number
        self._jobs[number] = job
        self._dues[number] = due
        if self._wanted is None or number in self._wanted:
            heappush(self._pending, (due, number))
            self._pump()

    def result(self, number: int) -> ClientUpdate:
        if number in self._jobs:
            heappush(self._pending, (float("-inf"), number))
        elif number not in self._results and number not in self._running:
            raise KeyError(f"dispatch {number} was never submitted")
        while number not in self._results:
            self._pump(requested=number)
            self._collect()
        self._pump()
        result = self._results.pop(number)
        del self._dues[number]
        if isinstance(result, Failed):
            raise WorkerError.from_worker(f"training of client {result.client} failed", result.error)
        return result

    def cancel(self, number: int) -> None:
        self._dues.pop(number, None)
        self._losses.pop(number, None)
        if self._jobs.pop(number, None) is None and self._results.pop(number, None) is None and number in self._running:
            self._cancelled.add(number)

    def _ready(self) -> list[W]:
        """Return the workers that accept orders."""
        return self._workers

    def _pump(self, requested: int | None = None) -> None:
        """Send orders to workers with spare capacity. A requested result may exceed the bound on waiting results."""
        while self._pending and (requested in self._jobs or self._may_wait(self._pending[0][0])):
            number = self._pending[0][1]
            if number not in self._jobs:  # started already, or cancelled
                heappop(self._pending)
                continue
            worker = min(self._ready(), key=lambda one: one.load, default=None)
            if worker is None or worker.load >= self._depth:
                return
            heappop(self._pending)
            self._running.add(number)
            self._order(worker, self._jobs.pop(number))

    def _may_wait(self, due: float) -> bool:
        """Whether one more result may wait. Results due later must not block a job that is due before them."""
        num, bound = len(self._results), self._ahead * len(self._workers)
        return num < bound or (num < 2 * bound and due < max(self._dues[number] for number in self._results))

    def _settle(self, number: int, result: ClientUpdate | Failed) -> None:
        """Record the answer to an order."""
        self.num_trained += 1
        self._losses.pop(number, None)
        self._running.discard(number)
        if number in self._cancelled:
            self._cancelled.discard(number)
        else:
            self._results[number] = result

    def _false_start(self, reason: str) -> None:
        """Count a worker lost during start-up; abort when that keeps happening."""
        self._false_starts += 1
        if self._false_starts > MAX_LOSSES * len(self._workers):  # losing a node loses several workers at once
            raise WorkerError(f"workers keep dying before they have started: {reason}")

    def _put_back(self, job: Job, reason: str, *, begun: bool = True) -> None:
        """Queue the job of a lost worker again; abort if the job has already lost too many workers."""
        number = job.dispatch.number
        self._running.discard(number)
        if number in self._cancelled:
            self._cancelled.discard(number)
            return
        self._losses[number] += begun
        if self._losses[number] > MAX_LOSSES:
            raise WorkerError(
                f"{self._losses[number]} workers died while training client {job.dispatch.client}; out of memory? ({reason})"
            )
        self._jobs[number] = job
        heappush(self._pending, (float("-inf"), number))

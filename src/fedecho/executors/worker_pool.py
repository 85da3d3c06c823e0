"""Workers that get jobs in the order they are due: what a process pool and a Ray cluster have in common."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Set
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

from fedecho.core.types import ClientUpdate
from fedecho.executors.executor import Job
from fedecho.executors.worker import Failed

DEPTH = 2
"""Orders a worker holds at once: it goes on training while this process distils."""
AHEAD = 4
"""Results per worker that may wait for their time, by default, and twice as many while others are due before: it bounds memory."""

MAX_LOSSES = 3
"""Workers that a job may lose, and workers in a row, for each there should be, that may be lost before they have begun."""


class WorkerError(RuntimeError):
    """A worker died too often, or a client's training failed."""

    @classmethod
    def told(cls, what: str, told: str) -> "WorkerError":
        """``told`` is a worker's error in a line, and its traceback where that says more: beside the message, not in it."""
        line, _, trace = told.partition("\n")
        error = cls(f"{what}: {line}")
        if trace:
            error.add_note(f"in the worker:\n{trace}")
        return error


class Busy(Protocol):
    """A worker, as far as sharing out work goes."""

    @property
    def load(self) -> int:
        """How many orders it holds."""
        ...


W = TypeVar("W", bound=Busy)


class Crew(ABC, Generic[W]):
    """An executor over workers. Jobs past the end of the run (not in ``wanted``) start only when they are asked for."""

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
        self._workers: list[W] = []
        self.num_trained = 0

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @abstractmethod
    def _order(self, worker: W, job: Job) -> None:
        """Tell a worker of its next job. Returns at once."""

    @abstractmethod
    def _collect(self) -> None:
        """Wait until some worker has answered or died: ``_settle`` or ``_put_back`` each of the jobs concerned."""

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
            self._pump(asked=number)
            self._collect()
        self._pump()
        found = self._results.pop(number)
        del self._dues[number]
        if isinstance(found, Failed):
            raise WorkerError.told(f"training of client {found.client} failed", found.error)
        return found

    def cancel(self, number: int) -> None:
        self._dues.pop(number, None)
        self._losses.pop(number, None)
        if self._jobs.pop(number, None) is None and self._results.pop(number, None) is None and number in self._running:
            self._cancelled.add(number)

    def _ready(self) -> list[W]:
        """The workers that can be given orders."""
        return self._workers

    def _pump(self, asked: int | None = None) -> None:
        """Give orders to workers that have room. A result that is asked for may exceed the bound on waiting ones."""
        while self._pending and (asked in self._jobs or self._may_wait(self._pending[0][0])):
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
        """Is there room for one more result? Those of far-off clients must not stand in the way of one that is due before them."""
        num, bound = len(self._results), self._ahead * len(self._workers)
        return num < bound or (num < 2 * bound and due < max(self._dues[number] for number in self._results))

    def _settle(self, number: int, found: ClientUpdate | Failed) -> None:
        """An order was answered."""
        self.num_trained += 1
        self._losses.pop(number, None)
        self._running.discard(number)
        if number in self._cancelled:
            self._cancelled.discard(number)
        else:
            self._results[number] = found

    def _begun(self) -> None:
        """A worker has started well."""
        self._false_starts = 0

    def _false_start(self, reason: str) -> None:
        """A worker was lost before it had begun: when that goes on and on, nothing will come of it."""
        self._false_starts += 1
        if self._false_starts > MAX_LOSSES * len(self._workers):  # a node that is lost takes several at once
            raise WorkerError(f"workers are lost before they begin: {reason}")

    def _put_back(self, job: Job, reason: str, *, begun: bool = True) -> None:
        """A worker is gone with this order: another does it, to the same result, unless it has cost too many that had begun."""
        number = job.dispatch.number
        self._running.discard(number)
        if number in self._cancelled:
            self._cancelled.discard(number)
            return
        self._losses[number] += begun
        if self._losses[number] > MAX_LOSSES:
            raise WorkerError(f"client {job.dispatch.client} lost {self._losses[number]} workers; out of memory? ({reason})")
        self._jobs[number] = job
        heappush(self._pending, (float("-inf"), number))

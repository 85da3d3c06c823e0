"""Several processes on one machine: jobs by pipe, weights by shared memory, one thread each."""

import multiprocessing
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate
from fedecho.learning.trainer import Trainer
from fedecho.simulation.executors.executor import Job
from fedecho.simulation.executors.shared import Segment, Segments
from fedecho.simulation.executors.worker import NEEDS_GUARD, NOT_STARTED, Done, Failed, Order, deaf_children, work

DEPTH = 2
"""Orders a worker holds at once: it goes on training while this process distils."""
AHEAD = 4
"""Results per worker that may wait for their time: what bounds the memory."""
MAX_RESTARTS = 3


class WorkerError(RuntimeError):
    """A worker died too often, or a client's training failed."""


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    orders: dict[int, tuple[Job, Segment]] = field(default_factory=dict)


class PoolExecutor:
    """Jobs start in the order they are due; those past the end of the run (not in ``wanted``) only when asked for."""

    def __init__(
        self, *, num_workers: int, layout: Layout, make_trainer: Callable[[], Trainer], wanted: Set[int] | None = None
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"workers must be at least 1, got {num_workers}")
        self._layout = layout
        self._make_trainer = make_trainer
        self._wanted = wanted
        self._segments = Segments(2 * layout.num_params + layout.num_buffers)
        self._models: dict[int, tuple[Segment, set[int]]] = {}
        self._jobs: dict[int, Job] = {}
        self._pending: list[tuple[float, int]] = []
        self._results: dict[int, ClientUpdate | Failed] = {}
        self._cancelled: set[int] = set()
        self._restarts = 0
        self.num_trained = 0
        self._workers = [self._spawn() for _ in range(num_workers)]

    def submit(self, job: Job, due: float) -> None:
        number = job.dispatch.number
        self._jobs[number] = job
        if self._wanted is None or number in self._wanted:
            heappush(self._pending, (due, number))
            self._pump()

    def result(self, number: int) -> ClientUpdate:
        if number in self._jobs:
            heappush(self._pending, (float("-inf"), number))
        elif number not in self._results and not self._is_running(number):
            raise KeyError(f"dispatch {number} was never submitted")
        while number not in self._results:
            self._pump(asked=number)
            self._collect()
        self._pump()
        found = self._results.pop(number)
        if isinstance(found, Failed):
            raise WorkerError(f"training of client {found.client} failed: {found.error}")
        return found

    def cancel(self, number: int) -> None:
        if self._jobs.pop(number, None) is None and self._results.pop(number, None) is None and self._is_running(number):
            self._cancelled.add(number)

    def _is_running(self, number: int) -> bool:
        return any(number in worker.orders for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
            if worker.orders:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()
        self._segments.close()

    def _spawn(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self._make_trainer), daemon=True)
        with deaf_children():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _pump(self, asked: int | None = None) -> None:
        """Give orders to workers that have room. A result that is asked for may exceed the bound on waiting ones."""
        while self._pending and (asked in self._jobs or len(self._results) < AHEAD * len(self._workers)):
            number = self._pending[0][1]
            if number not in self._jobs:  # started already, or cancelled
                heappop(self._pending)
                continue
            worker = min(self._workers, key=lambda one: len(one.orders))
            if len(worker.orders) >= DEPTH:
                return
            heappop(self._pending)
            self._order(worker, self._jobs.pop(number))
            asked = None if number == asked else asked

    def _order(self, worker: _Worker, job: Job) -> None:
        dispatch, result = job.dispatch, self._segments.take()
        if job.control is not None:
            result.vector[-self._layout.num_params :].copy_(job.control)
        order = Order(
            number=dispatch.number,
            client=dispatch.client,
            version=dispatch.model.version,
            seed=dispatch.seed,
            model=self._model(job).name,
            result=result.name,
            has_correction=dispatch.model.correction is not None,
            has_control=job.control is not None,
        )
        worker.orders[dispatch.number] = (job, result)
        try:
            worker.pipe.send(order)
        except OSError:  # it died while nobody looked
            self._replace(worker)

    def _model(self, job: Job) -> Segment:
        """The segment with the job's model, filled at the first order from that version and kept until its last."""
        model = job.dispatch.model
        if model.version not in self._models:
            segment = self._segments.take()
            parts = segment.vector.split([self._layout.num_params, self._layout.num_buffers, self._layout.num_params])
            parts[0].copy_(model.weights.params)
            parts[1].copy_(model.weights.buffers)
            if model.correction is not None:
                parts[2].copy_(model.correction)
            self._models[model.version] = (segment, set())
        segment, users = self._models[model.version]
        users.add(job.dispatch.number)
        return segment

    def _collect(self) -> None:
        """Wait until some worker has answered or died."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]  # type: ignore[index]
            answer = _heard(worker.pipe)
            if answer is None:
                self._replace(worker)
                continue
            if answer.number == NOT_STARTED:
                raise WorkerError(f"a worker could not start: {getattr(answer, 'error', '')}")
            job, segment = worker.orders.pop(answer.number)
            self._release(job)
            self.num_trained += 1
            if answer.number in self._cancelled:
                self._cancelled.discard(answer.number)
            else:
                self._results[answer.number] = self._update(answer, job, segment) if isinstance(answer, Done) else answer
            self._segments.give_back(segment)

    def _update(self, done: Done, job: Job, segment: Segment) -> ClientUpdate:
        parts = segment.vector.split([self._layout.num_params, self._layout.num_buffers, self._layout.num_params])
        return ClientUpdate(
            client=job.dispatch.client,
            base_version=job.dispatch.model.version,
            delta=parts[0].clone(),
            buffers=parts[1].clone(),
            num_examples=done.num_examples,
            num_steps=done.num_steps,
            correction=parts[2].clone() if done.has_correction else None,
            metrics=done.metrics,
        )

    def _release(self, job: Job) -> None:
        segment, users = self._models[job.dispatch.model.version]
        users.discard(job.dispatch.number)
        if not users:
            del self._models[job.dispatch.model.version]
            self._segments.give_back(segment)

    def _replace(self, dead: _Worker) -> None:
        """A worker died: start another and let its jobs run again, to the same result."""
        dead.process.join()
        if dead.process.exitcode == NEEDS_GUARD:
            raise WorkerError(
                'a pool starts processes that import your script: put what runs in it under `if __name__ == "__main__":`'
            )
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise WorkerError(f"workers keep dying (exit code {dead.process.exitcode}); out of memory?")
        self._workers[self._workers.index(dead)] = self._spawn()
        for number, (job, segment) in dead.orders.items():
            self._release(job)
            self._segments.give_back(segment)
            self._jobs[number] = job
            heappush(self._pending, (float("-inf"), number))


def _heard(pipe: Connection) -> Done | Failed | None:
    """What a worker says, or None if it died, between two answers or in the middle of one."""
    try:
        answer: Done | Failed = pipe.recv()
    except (EOFError, OSError):
        return None
    return answer

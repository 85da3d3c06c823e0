"""A pool of worker processes on one machine: jobs travel by pipe, weights by shared memory."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate
from fedecho.executors.executor import CPU, Job, JobRunner
from fedecho.executors.shared_memory import Segment, Segments
from fedecho.executors.worker import NEEDS_GUARD, NOT_STARTED, Done, Failed, JobOrder, Ready, interrupts_ignored, work
from fedecho.executors.worker_pool import AHEAD, DEPTH, WorkerError, WorkerPool
from fedecho.learning.trainer import Trainer

__all__ = ["AHEAD", "DEPTH", "PoolExecutor", "WorkerError"]
GRACE_S = 5.0
"""How long all workers together may take to exit before they are killed; killing them loses nothing."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    gpu: str | None = None
    ready: bool = False
    orders: dict[int, tuple[Job, Segment]] = field(default_factory=dict)
    segments: set[int] = field(default_factory=set)
    """Numbers of the segments this worker already has."""

    @property
    def load(self) -> int:
        return len(self.orders)

    def send(self, order: JobOrder, *segments: Segment) -> None:
        """Send the order, followed by any segments that are new to the worker."""
        self.pipe.send(order)
        for segment in segments:
            if segment.number not in self.segments:
                segment.send(self.pipe)
                self.segments.add(segment.number)


class PoolExecutor(WorkerPool[_Worker]):
    """Runs each worker in its own process and returns results on ``device``. With ``gpus``, worker k sees only the k-th GPU."""

    def __init__(
        self,
        *,
        num_workers: int,
        layout: Layout,
        make_trainer: Callable[[], Trainer | JobRunner],
        wanted: Set[int] | None = None,
        depth: int = DEPTH,
        gpus: Sequence[str] | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(num_workers=num_workers, wanted=wanted, depth=depth)
        self._layout = layout
        self._make_trainer = make_trainer
        self._device = device
        self._segments = Segments(2 * layout.num_params + layout.num_buffers)
        self._models: dict[int, tuple[Segment, set[int]]] = {}
        gpu_of_worker = [None] * num_workers if gpus is None else list(gpus)[:num_workers]
        self._workers = [self._spawn(gpu) for gpu in gpu_of_worker]

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
            if worker.orders or not worker.ready:
                worker.process.terminate()
        _join_or_kill([worker.process for worker in self._workers])
        self._workers.clear()
        self._segments.close()

    def _spawn(self, gpu: str | None = None) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self._make_trainer), daemon=True)
        with interrupts_ignored(), visible_gpu(gpu):
            process.start()
        theirs.close()
        return _Worker(process, ours, gpu)

    def _order(self, worker: _Worker, job: Job) -> None:
        dispatch, model, result = job.dispatch, self._model(job), self._segments.take()
        if job.control is not None:
            result.vector[-self._layout.num_params :].copy_(job.control)
        order = JobOrder(
            number=dispatch.number,
            client=dispatch.client,
            version=dispatch.model.version,
            seed=dispatch.seed,
            model=model.number,
            result=result.number,
            has_correction=dispatch.model.correction is not None,
            has_control=job.control is not None,
        )
        worker.orders[dispatch.number] = (job, result)
        try:
            worker.send(order, model, result)
        except OSError:  # the worker died unnoticed and never received this job
            self._take_back(*worker.orders.pop(dispatch.number), "the worker had died", begun=False)
            self._replace(worker)

    def _model(self, job: Job) -> Segment:
        """Return the segment that holds the job's model; it is filled once per version and freed after the version's last job."""
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
        """Wait until a worker answers or dies."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]  # type: ignore[index]
            answer = _receive(worker.pipe)
            if answer is None:
                self._replace(worker)
                continue
            if isinstance(answer, Ready):
                worker.ready, self._false_starts = True, 0
                continue
            if answer.number == NOT_STARTED:
                raise WorkerError.from_worker("a worker could not start", answer.error if isinstance(answer, Failed) else "")
            job, segment = worker.orders.pop(answer.number)
            self._release(job)
            self._settle(answer.number, self._update(answer, job, segment) if isinstance(answer, Done) else answer)
            self._segments.give_back(segment)

    def _update(self, done: Done, job: Job, segment: Segment) -> ClientUpdate:
        parts = segment.vector.split([self._layout.num_params, self._layout.num_buffers, self._layout.num_params])
        return ClientUpdate(
            client=job.dispatch.client,
            base_version=job.dispatch.model.version,
            delta=parts[0].to(self._device, copy=True),
            buffers=parts[1].to(self._device, copy=True),
            num_examples=done.num_examples,
            num_steps=done.num_steps,
            correction=parts[2].to(self._device, copy=True) if done.has_correction else None,
            metrics=done.metrics,
        )

    def _release(self, job: Job) -> None:
        segment, users = self._models[job.dispatch.model.version]
        users.discard(job.dispatch.number)
        if not users:
            del self._models[job.dispatch.model.version]
            self._segments.give_back(segment)

    def _replace(self, dead: _Worker) -> None:
        """Start a new worker in place of a dead one and run its jobs again; the results do not change."""
        _join_or_kill([dead.process])
        if dead.process.exitcode == NEEDS_GUARD:
            raise WorkerError(
                'a pool starts processes that import your script: put the code that runs it under `if __name__ == "__main__":`'
            )
        reason = f"exit code {dead.process.exitcode}"
        if not dead.ready:
            self._false_start(reason)
        for job, segment in dead.orders.values():
            self._take_back(job, segment, reason, begun=dead.ready)
        self._workers[self._workers.index(dead)] = self._spawn(dead.gpu)

    def _take_back(self, job: Job, segment: Segment, reason: str, *, begun: bool) -> None:
        self._release(job)
        self._segments.give_back(segment)
        self._put_back(job, reason, begun=begun)


@contextmanager
def visible_gpu(gpu: str | None) -> Iterator[None]:
    """Let processes started in this context see only the given GPU. They inherit the variable, so CUDA reads it at start-up."""
    before = dict(os.environ)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop(VISIBLE)
            os.environ.update({VISIBLE: before[VISIBLE]} if VISIBLE in before else {})


def _join_or_kill(processes: Iterable[SpawnProcess]) -> None:
    """Wait for processes to exit and kill any that do not in time: a task or library may have installed its own SIGTERM handler."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def _receive(pipe: Connection) -> Ready | Done | Failed | None:
    """Return the worker's next answer, or None if it died (between answers or in the middle of one)."""
    try:
        answer: Ready | Done | Failed = pipe.recv()
    except (EOFError, OSError):
        return None
    return answer

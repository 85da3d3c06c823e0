"""The worker process of a pool: it receives job orders, trains, and answers."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.executors.executor import Job, JobRunner, error_text, job_runner
from fedecho.executors.shared_memory import receive_segment
from fedecho.learning.trainer import Trainer

NOT_STARTED = -1
"""The number in an answer when the worker could not start."""
NEEDS_GUARD = 77
"""Exit code of a process whose parent script lacks an ``if __name__ == "__main__":`` guard."""


def refuse_while_importing() -> None:
    """Exit if this process is still importing its parent's script: a run here would spawn processes without end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NEEDS_GUARD)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Start processes in this context with SIGINT ignored: only the parent handles Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """A job as sent through the pipe: it names shared segments and holds no tensors.

    The model segment holds params, buffers and c. The result segment holds delta, buffers and one more vector: c_i when the
    order is sent, dc_i when it is answered. Segments that are new to the worker follow the order, the model's first.
    """

    number: int
    client: int
    version: int
    seed: int
    model: int
    result: int
    has_correction: bool
    has_control: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has started and accepts orders."""


@dataclass(frozen=True, slots=True)
class Done:
    number: int
    num_examples: float
    num_steps: int
    has_correction: bool
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    number: int
    client: int
    error: str


def work(pipe: Connection, make: Callable[[], Trainer | JobRunner]) -> None:
    """Answer orders until the pipe closes. SIGINT is ignored: the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        runner = SharedMemoryRunner(job_runner(make()))
    except Exception as error:  # the parent reports it to the user
        pipe.send(Failed(NOT_STARTED, NOT_STARTED, error_text(error)))
        os._exit(1)
    _send(pipe, Ready())
    waiting: deque[JobOrder] = deque()
    closed = False
    while waiting or not closed:
        # Start every order that has arrived before waiting for a result: a GPU works on several jobs at once.
        while not closed and (not waiting or pipe.poll()):
            order = _next_order(pipe, runner)
            closed = order is None
            if order is not None:
                runner.start(order)
                waiting.append(order)
        if waiting and not _send(pipe, runner.finish(waiting.popleft())):
            break
    os._exit(0)  # nothing needs cleaning up, and views of shared memory may still exist


def _next_order(pipe: Connection, runner: "SharedMemoryRunner") -> JobOrder | None:
    try:
        order: JobOrder | None = pipe.recv()
    except (EOFError, OSError):  # the parent has exited
        return None
    try:
        if order is not None:
            runner.receive(order, pipe)
    except (EOFError, ConnectionError):
        return None
    return order


def _send(pipe: Connection, answer: Ready | Done | Failed) -> bool:
    try:
        pipe.send(answer)
    except OSError:
        return False
    return True


class SharedMemoryRunner:
    """Runs jobs whose tensors arrive and leave through shared memory."""

    def __init__(self, runner: JobRunner) -> None:
        layout = runner.layout
        self._runner = runner
        self._parts = [layout.num_params, layout.num_buffers, layout.num_params]
        self._segments: dict[int, Tensor] = {}

    def receive(self, order: JobOrder, pipe: Connection) -> None:
        """Map the order's segments that have not been received before."""
        for number in (order.model, order.result):
            if number not in self._segments:
                self._segments[number] = receive_segment(pipe, sum(self._parts))

    def start(self, order: JobOrder) -> None:
        params, buffers, correction = self._vectors(order.model)
        base = GlobalModel(order.version, Weights(params, buffers), correction if order.has_correction else None)
        control = self._vectors(order.result)[2].clone() if order.has_control else None
        self._runner.start(Job(Dispatch(order.number, order.client, base, order.seed), control))

    def finish(self, order: JobOrder) -> Done | Failed:
        update = self._runner.finish(order.number)
        if isinstance(update, str):
            return Failed(order.number, order.client, update)
        delta, buffers, correction = self._vectors(order.result)
        delta.copy_(update.delta)
        buffers.copy_(update.buffers)
        if update.correction is not None:
            correction.copy_(update.correction)
        return Done(order.number, update.num_examples, update.num_steps, update.correction is not None, dict(update.metrics))

    def _vectors(self, number: int) -> tuple[Tensor, ...]:
        """Split a segment into params (or delta), buffers, and the correction or control variate."""
        vectors: tuple[Tensor, ...] = self._segments[number].split(self._parts)
        return vectors

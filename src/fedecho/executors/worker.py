"""A worker process of a pool: it keeps a bench, and trains what it is told."""

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
from fedecho.executors.executor import Bench, Job, bench_of, told
from fedecho.executors.shared_memory import received
from fedecho.learning.trainer import Trainer

NOT_STARTED = -1
"""The number of an answer to no order: the worker could not start."""


NEEDS_GUARD = 77
"""The exit code of a process that was started by a script whose own start is not guarded."""


def refuse_while_importing() -> None:
    """In a process that is still importing the script that started it: a run would start processes without end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NEEDS_GUARD)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started inside begin deaf to Ctrl-C, which is their parent's business; so they inherit it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class Order:
    """A job as it goes through the pipe: numbers of shared segments, no tensors.

    The model segment holds params, buffers and c; the result segment delta, buffers and, on its way in, c_i, on its way out dc_i.
    The files of segments that the worker has not seen yet follow, first the model's.
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
    """The worker has started, and takes orders."""


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


def work(pipe: Connection, make: Callable[[], Trainer | Bench]) -> None:
    """Answer orders until the pipe closes. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        station = Station(bench_of(make()))
    except Exception as error:  # the parent says it to the user
        pipe.send(Failed(NOT_STARTED, NOT_STARTED, told(error)))
        os._exit(1)
    _said(pipe, Ready())
    waiting: deque[Order] = deque()
    over = False
    while waiting or not over:
        # All there is to take before anybody waits for a result: a GPU works on several jobs at once.
        while not over and (not waiting or pipe.poll()):
            order = _heard(pipe, station)
            over = order is None
            if order is not None:
                station.take(order)
                waiting.append(order)
        if waiting and not _said(pipe, station.give(waiting.popleft())):
            break
    os._exit(0)  # nothing here needs tidying, and views of shared memory may still be alive


def _heard(pipe: Connection, station: "Station") -> Order | None:
    try:
        order: Order | None = pipe.recv()
    except (EOFError, OSError):  # the parent is gone
        return None
    try:
        if order is not None:
            station.receive(order, pipe)
    except (EOFError, ConnectionError):
        return None
    return order


def _said(pipe: Connection, answer: Ready | Done | Failed) -> bool:
    try:
        pipe.send(answer)
    except OSError:
        return False
    return True


class Station:
    """A bench whose jobs come and go through shared memory."""

    def __init__(self, bench: Bench) -> None:
        layout = bench.layout
        self._bench = bench
        self._parts = [layout.num_params, layout.num_buffers, layout.num_params]
        self._segments: dict[int, Tensor] = {}

    def receive(self, order: Order, pipe: Connection) -> None:
        """Map the segments of an order that are new here."""
        for number in (order.model, order.result):
            if number not in self._segments:
                self._segments[number] = received(pipe, sum(self._parts))

    def take(self, order: Order) -> None:
        params, buffers, correction = self._vectors(order.model)
        base = GlobalModel(order.version, Weights(params, buffers), correction if order.has_correction else None)
        control = self._vectors(order.result)[2].clone() if order.has_control else None
        self._bench.take(Job(Dispatch(order.number, order.client, base, order.seed), control))

    def give(self, order: Order) -> Done | Failed:
        update = self._bench.give(order.number)
        if isinstance(update, str):
            return Failed(order.number, order.client, update)
        delta, buffers, correction = self._vectors(order.result)
        delta.copy_(update.delta)
        buffers.copy_(update.buffers)
        if update.correction is not None:
            correction.copy_(update.correction)
        return Done(order.number, update.num_examples, update.num_steps, update.correction is not None, dict(update.metrics))

    def _vectors(self, number: int) -> tuple[Tensor, ...]:
        """Params or delta, buffers, and c, c_i or dc_i."""
        vectors: tuple[Tensor, ...] = self._segments[number].split(self._parts)
        return vectors

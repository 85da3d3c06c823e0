"""A worker process: it keeps the task and one network, and trains what it is told."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.learning.trainer import Trainer
from fedecho.simulation.executors.shared import Segment

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
    """A job as it goes through the pipe: names of shared memory, no tensors.

    The model segment holds params, buffers and c; the result segment delta, buffers and, on its way in, c_i, on its way out dc_i.
    """

    number: int
    client: int
    version: int
    seed: int
    model: str
    result: str
    has_correction: bool
    has_control: bool


@dataclass(frozen=True, slots=True)
class Done:
    number: int
    num_examples: int
    num_steps: int
    has_correction: bool
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    number: int
    client: int
    error: str


def work(pipe: Connection, make_trainer: Callable[[], Trainer]) -> None:
    """Answer orders until the pipe closes. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        trainer = make_trainer()
    except Exception as error:  # the parent says it to the user
        pipe.send(Failed(NOT_STARTED, NOT_STARTED, f"{error}\n{traceback.format_exc()}"))
        os._exit(1)
    layout = trainer.network.layout
    size = 2 * layout.num_params + layout.num_buffers
    segments: dict[str, Segment] = {}
    while True:
        try:
            order: Order | None = pipe.recv()
        except (EOFError, OSError):  # the parent is gone
            order = None
        if order is None:
            break
        for name in (order.model, order.result):
            if name not in segments:
                segments[name] = Segment(size, name)
        try:
            answer: Done | Failed = _run(trainer, order, segments[order.model], segments[order.result])
        except Exception as error:  # the parent decides what a failed client means
            answer = Failed(order.number, order.client, f"{error}\n{traceback.format_exc()}")
        try:
            pipe.send(answer)
        except OSError:
            break
    os._exit(0)  # nothing here needs tidying, and views of shared memory may still be alive


def _run(trainer: Trainer, order: Order, model: Segment, result: Segment) -> Done:
    layout = trainer.network.layout
    parts = [layout.num_params, layout.num_buffers, layout.num_params]
    params, buffers, correction = model.vector.split(parts)
    delta_out, buffers_out, control = result.vector.split(parts)
    base = GlobalModel(order.version, Weights(params, buffers), correction if order.has_correction else None)
    dispatch = Dispatch(order.number, order.client, base, order.seed)
    update = trainer.train(dispatch, control.clone() if order.has_control else None)
    delta_out.copy_(update.delta)
    buffers_out.copy_(update.buffers)
    if update.correction is not None:
        control.copy_(update.correction)
    return Done(order.number, update.num_examples, update.num_steps, update.correction is not None, dict(update.metrics))

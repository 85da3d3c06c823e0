"""A pool whose workers are played by the test: it reads the orders and writes the answers, when it likes."""

import os
import struct
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from fedecho.core.layout import Layout
from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.simulation.executors.executor import Job
from fedecho.simulation.executors.pool import PoolExecutor, _Worker
from fedecho.simulation.executors.shared import Segment
from fedecho.simulation.executors.worker import Done, Failed, Order

LAYOUT = Layout.of(nn.BatchNorm1d(2))
PARTS = [LAYOUT.num_params, LAYOUT.num_buffers, LAYOUT.num_params]


class HandProcess:
    exitcode = -9

    def __init__(self) -> None:
        self.joined = self.terminated = False

    def join(self, timeout: float | None = None) -> None:
        self.joined = True

    def terminate(self) -> None:
        self.terminated = True


class HandPool(PoolExecutor):
    """``ends[k]`` is the k-th worker's end of its pipe; those of replacements come after the first ones."""

    def __init__(self, num_workers: int = 1, wanted: Any = None, *, ready: bool = True, **options: Any) -> None:
        self.ready = ready
        self.ends: list[Connection] = []
        self.processes: list[HandProcess] = []
        self.shown: list[str | None] = []
        super().__init__(num_workers=num_workers, layout=LAYOUT, make_trainer=lambda: None, wanted=wanted, **options)  # type: ignore[arg-type,return-value]

    def _spawn(self, gpu: Any = None) -> _Worker:
        ours, theirs = Pipe()
        self.ends.append(theirs)
        self.processes.append(HandProcess())
        self.shown.append(gpu)
        return _Worker(self.processes[-1], ours, gpu, self.ready)  # type: ignore[arg-type]

    def orders(self, worker: int = 0) -> list[Order]:
        """What this worker was told since it was asked last."""
        found = []
        while self.ends[worker].poll():
            found.append(self.ends[worker].recv())
        return found

    def numbers(self, worker: int = 0) -> list[int]:
        return [order.number for order in self.orders(worker)]

    def answer(self, order: Order, worker: int = 0) -> None:
        """delta = params x 2, buffers + 1, and the control variate times 10 for a correction."""
        model, result = Segment(sum(PARTS), order.model), Segment(sum(PARTS), order.result)
        params, buffers, _ = model.vector.split(PARTS)
        out, out_buffers, control = result.vector.split(PARTS)
        out.copy_(2 * params)
        out_buffers.copy_(buffers + 1)
        if order.has_control:
            control.mul_(10)
        model.close()
        result.close()
        self.ends[worker].send(Done(order.number, order.client, 3, order.has_control, {"number": float(order.number)}))

    def fail(self, order: Order, worker: int = 0) -> None:
        self.ends[worker].send(Failed(order.number, order.client, "division by zero"))

    def kill(self, worker: int = 0, *, in_mid_word: bool = False) -> None:
        if in_mid_word:
            os.write(self.ends[worker].fileno(), struct.pack("!i", 1000) + b"half an answ")
        self.ends[worker].close()


def model(version: int = 0) -> GlobalModel:
    return GlobalModel(version, Weights(torch.arange(4.0) + version, torch.arange(4.0) - version))


def job(number: int, client: int = 0, version: int = 0, control: Any = None) -> Job:
    return Job(Dispatch(number, client, model(version), seed=number), control)

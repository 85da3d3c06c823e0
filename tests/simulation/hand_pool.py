"""A pool whose workers are simulated by the test, which reads orders and writes answers when it chooses."""

import os
import struct
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedecho.core.layout import Layout
from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.executors.executor import Job
from fedecho.executors.pool import PoolExecutor, _Worker
from fedecho.executors.shared_memory import receive_segment
from fedecho.executors.worker import Done, Failed, JobOrder

LAYOUT = Layout.of(nn.BatchNorm1d(2))
SHARED = Path("/dev/shm")  # noqa: S108
PARTS = [LAYOUT.num_params, LAYOUT.num_buffers, LAYOUT.num_params]


def shared_memory(process: int | str = "self") -> set[str]:
    """Return the inodes of our files in ``/dev/shm`` that a process maps; none has a name. Excludes torch's and semaphores."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    files = [(Path(line[-1]), line[4]) for line in lines if line[-1].startswith(f"{SHARED}/")]
    assert all(path.name.endswith(" (deleted)") for path, _ in files)
    return {inode for path, inode in files if not path.name.startswith(("torch_", "sem."))}


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
        self.vectors: list[dict[int, Tensor]] = []
        self.processes: list[HandProcess] = []
        self.shown: list[str | None] = []
        super().__init__(num_workers=num_workers, layout=LAYOUT, make_trainer=lambda: None, wanted=wanted, **options)  # type: ignore[arg-type,return-value]

    def _spawn(self, gpu: Any = None) -> _Worker:
        ours, theirs = Pipe()
        self.ends.append(theirs)
        self.vectors.append({})
        self.processes.append(HandProcess())
        self.shown.append(gpu)
        return _Worker(self.processes[-1], ours, gpu, self.ready)  # type: ignore[arg-type]

    def orders(self, worker: int = 0) -> list[JobOrder]:
        """Return the orders sent to this worker since the last call."""
        found = []
        while self.ends[worker].poll():
            found.append(self.next_order(worker))
        return found

    def next_order(self, worker: int = 0) -> JobOrder:
        """Wait for the next order and the memory segments sent with it."""
        order: JobOrder = self.ends[worker].recv()
        for number in (order.model, order.result):
            if number not in self.vectors[worker]:
                self.vectors[worker][number] = receive_segment(self.ends[worker], sum(PARTS))
        return order

    def numbers(self, worker: int = 0) -> list[int]:
        return [order.number for order in self.orders(worker)]

    def answer(self, order: JobOrder, worker: int = 0) -> None:
        """delta = params x 2, buffers + 1, and the control variate times 10 for a correction."""
        params, buffers, _ = self.vectors[worker][order.model].split(PARTS)
        out, out_buffers, control = self.vectors[worker][order.result].split(PARTS)
        out.copy_(2 * params)
        out_buffers.copy_(buffers + 1)
        if order.has_control:
            control.mul_(10)
        self.ends[worker].send(Done(order.number, order.client, 3, order.has_control, {"number": float(order.number)}))

    def turn(self) -> None:
        """Take what a worker has sent, and send what may be sent: what waiting for a result does again and again."""
        self._collect()
        self._pump()

    def answer_all(self, worker: int = 0) -> list[int]:
        """Answer the orders sent to this worker so far, one after another, and return their numbers."""
        orders = self.orders(worker)
        for order in orders:
            self.answer(order, worker)
            self.turn()
        return [order.number for order in orders]

    def fail(self, order: JobOrder, worker: int = 0) -> None:
        self.ends[worker].send(Failed(order.number, order.client, "division by zero"))

    def kill(self, worker: int = 0, *, mid_message: bool = False) -> None:
        if mid_message:
            os.write(self.ends[worker].fileno(), struct.pack("!i", 1000) + b"half an answ")
        self.ends[worker].close()


def model(version: int = 0) -> GlobalModel:
    return GlobalModel(version, Weights(torch.arange(4.0) + version, torch.arange(4.0) - version))


def job(number: int, client: int = 0, version: int = 0, control: Any = None) -> Job:
    return Job(Dispatch(number, client, model(version), seed=number), control)

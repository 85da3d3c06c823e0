"""A federation of arithmetic: updates are a function of the job, so that whole runs are cheap."""

from typing import Any

import torch

from fedecho.algorithms import FedBuff
from fedecho.core.loop import Moment, Transport, drive
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Message, Weights
from fedecho.executors.executor import Job, SerialExecutor

NUM_CLIENTS = 8


def toy_update(job: Job) -> ClientUpdate:
    """Depends on the client, the base model, the seed and the control variate, and on nothing else."""
    dispatch, weights = job.dispatch, job.dispatch.model.weights
    noise = torch.rand(3, generator=torch.Generator().manual_seed(dispatch.seed)) - 0.5
    control = torch.zeros(3) if job.control is None else job.control
    delta = 0.1 * noise - 0.2 * weights.params + 0.05 * (control - dispatch.client / 10)
    return ClientUpdate(
        dispatch.client, dispatch.model.version, delta, weights.buffers + delta[:1], 5, 2, correction=0.5 * (delta - control)
    )


class NotingExecutor(SerialExecutor):
    """A serial executor that notes what it was told."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        super().__init__(toy_update)

    def submit(self, job: Job, due: float) -> None:
        self.log.append(("submit", job.dispatch.number, job.dispatch.client, due))
        super().submit(job, due)

    def cancel(self, number: int) -> None:
        self.log.append(("cancel", number))
        super().cancel(number)


class Table:
    """Runtimes that are written down: one per dispatch, in turn."""

    def __init__(self, *runtimes: float) -> None:
        self.runtimes = runtimes

    def class_of(self, client: int) -> str:
        return "written"

    def draw(self, client: int, dispatch: int) -> float:
        return self.runtimes[dispatch % len(self.runtimes)]


def model(version: int = 0) -> GlobalModel:
    return GlobalModel(version, Weights(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([2.0])))


def dispatch(number: int, client: int, version: int = 0) -> Dispatch:
    return Dispatch(number, client, model(version), seed=100 + number)


def make_server(algorithm: Any = None, *, concurrency: int = 4, seed: int = 0) -> Server[Any]:
    method = algorithm or FedBuff(buffer_size=3)
    return Server(algorithm=method, model=model(), num_clients=NUM_CLIENTS, concurrency=concurrency, seed=seed)


def run(server: Server[Any], transport: Transport, num_versions: int, **options: Any) -> list[tuple[Any, ...]]:
    """Drive to the end; every moment as plain values, the models with all their digits."""
    log: list[tuple[Any, ...]] = []

    def watch(moment: Moment) -> None:
        receipt = moment.receipt
        made = () if moment.step is None else tuple(moment.step.model.weights.params.tolist())
        log.append((moment.time, receipt.status, receipt.client, receipt.dispatch, receipt.staleness, receipt.norm, made))

    drive(server, transport, num_versions=num_versions, watch=watch, **options)
    return log


def message_of(message: Message) -> tuple[str, int]:
    return type(message).__name__, message.client

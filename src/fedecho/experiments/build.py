"""The composition root: the one place where an experiment's parts meet."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal

import torch

from fedecho.core.algorithm import demands
from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.rng import derive
from fedecho.core.server import Server
from fedecho.core.task import Task
from fedecho.core.types import GlobalModel
from fedecho.distill.student import Student
from fedecho.experiments.experiment import Experiment
from fedecho.learning.local import LocalTraining
from fedecho.learning.trainer import Trainer
from fedecho.simulation.executors.executor import Executor
from fedecho.simulation.executors.pool import PoolExecutor
from fedecho.simulation.executors.serial import SerialExecutor
from fedecho.simulation.forecast import forecast
from fedecho.simulation.runtimes import ClientRuntimes
from fedecho.simulation.transport import VirtualTransport

ExecutorName = Literal["serial", "pool"]
EXECUTORS: tuple[ExecutorName, ...] = ("serial", "pool")


@dataclass(frozen=True)
class MakeTrainer:
    """Builds a trainer; pickled to worker processes, so it holds settings and no tensors."""

    task: Task
    local: LocalTraining
    seed: int

    def __call__(self) -> Trainer:
        return Trainer(self.task, self.local, bound_network(self.task, self.seed))


@dataclass(frozen=True)
class Simulation:
    """An experiment put together, ready to be driven."""

    experiment: Experiment
    server: Server[Any]
    transport: VirtualTransport
    runtimes: ClientRuntimes
    network: BoundNetwork

    def evaluate(self) -> dict[str, float]:
        """The task's scores of the current model."""
        self.network.load(self.server.model.weights)
        return dict(self.experiment.task.evaluate(self.network.module.eval()))


def bound_network(task: Task, seed: int) -> BoundNetwork:
    module = task.network(derive(seed, "network"))
    return Layout.of(module).bind(module)


@contextmanager
def assembled(experiment: Experiment, executor: ExecutorName = "serial", workers: int = 2) -> Iterator[Simulation]:
    """The simulation of an experiment; its worker processes end with the context."""
    task, seed = experiment.task, experiment.seed
    network = bound_network(task, seed)
    sizes = [task.num_examples(client) for client in range(task.num_clients)]
    runtimes = experiment.runtimes.assign(sizes, seed)
    algorithm = experiment.algorithm
    if hasattr(algorithm, "attached"):
        algorithm = algorithm.attached(Student(network, task.logits, task.num_unlabeled))
    server: Server[Any] = Server(
        algorithm=algorithm,
        model=GlobalModel(0, network.layout.pack(network.module)),
        num_clients=task.num_clients,
        concurrency=experiment.concurrency,
        seed=seed,
        admission=experiment.admission,
    )
    runner = _executor(experiment, executor, workers, network, runtimes)
    try:
        yield Simulation(experiment, server, _transport(experiment, runner, runtimes), runtimes, network)
    finally:
        runner.close()


def _transport(experiment: Experiment, executor: Executor, runtimes: ClientRuntimes) -> VirtualTransport:
    return VirtualTransport(
        executor=executor,
        runtimes=runtimes,
        num_clients=experiment.task.num_clients,
        seed=experiment.seed,
        faults=experiment.faults,
        client_memory=experiment.client_memory,
    )


def _executor(
    experiment: Experiment, name: ExecutorName, workers: int, network: BoundNetwork, runtimes: ClientRuntimes
) -> Executor:
    task, local = experiment.task, experiment.local_training
    if name == "serial":
        trainer = Trainer(task, local, network)
        return SerialExecutor(lambda job: trainer.train(job.dispatch, job.control))
    if name != "pool":
        raise ValueError(f"executor must be one of {', '.join(EXECUTORS)}, got {name!r}")
    fresh = replace(task) if is_dataclass(task) and not isinstance(task, type) else task  # without what it has cached
    return PoolExecutor(
        num_workers=workers,
        layout=network.layout,
        make_trainer=MakeTrainer(fresh, local, experiment.seed),
        wanted=_wanted(experiment, runtimes),
    )


def _wanted(experiment: Experiment, runtimes: ClientRuntimes) -> frozenset[int] | None:
    if experiment.buffer_size is None:
        return None
    return forecast(
        buffer_size=experiment.buffer_size,
        demands=demands(experiment.algorithm),
        num_clients=experiment.task.num_clients,
        concurrency=experiment.concurrency,
        seed=experiment.seed,
        num_versions=experiment.num_versions,
        dispatch_after_step=experiment.dispatch_after_step,
        make_transport=lambda executor: _transport(experiment, executor, runtimes),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums over several threads round differently; with one, every process agrees to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

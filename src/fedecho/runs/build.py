"""Builds a simulation from an experiment: server, transport, executor and evaluation."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedecho.algorithms.noised import Noised
from fedecho.core.algorithm import demands
from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.loop import Moment
from fedecho.core.randomness import derive
from fedecho.core.server import Server
from fedecho.core.task import HasClasses, HasInputs, Saves, Task, scores_of
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.distill.distiller import Distiller
from fedecho.distill.student import Student, check_unlabeled, distils, student_for
from fedecho.executors.executor import Executor, SerialExecutor
from fedecho.learning.local import LocalTraining
from fedecho.learning.trainer import Trainer
from fedecho.runs.execution import Execution, start_workers, with_actual_workers
from fedecho.runs.experiment import Experiment
from fedecho.simulation.attacks import FloodedRuntimes, PoisonedTask
from fedecho.simulation.forecast import Forecast, forecast
from fedecho.simulation.runtimes import ClientRuntimes
from fedecho.simulation.transport import UpdateTransform, VirtualTransport, unchanged


def attackers_of(experiment: Experiment) -> Set[int]:
    return experiment.attack.attackers(experiment.task.num_clients, experiment.seed)


def training_task(experiment: Experiment) -> Task:
    """The task that clients train on, with the attackers' labels flipped if the attack poisons data."""
    task, attack = experiment.task, experiment.attack
    if not attack.poisons_data:
        return task
    if not isinstance(task, HasClasses):
        raise ValueError(
            f"attack.kind = {attack.kind!r} needs a task with a num_classes attribute; {type(task).__name__} has none"
        )
    return PoisonedTask(task, attack, attackers_of(experiment), task.num_classes)


def outgoing_updates(experiment: Experiment, layout: Layout, device: torch.device) -> UpdateTransform:
    """How updates change before they are sent: client-side privacy first, then the attack."""
    privacy, attack, attackers = experiment.privacy, experiment.attack, attackers_of(experiment)
    variances = layout.variances(device)

    def sent(dispatch: Dispatch, update: ClientUpdate) -> ClientUpdate:
        if privacy.on and privacy.where == "client":
            update = privacy.sent(update, dispatch.model, dispatch.seed, variances)
        return attack.sent(dispatch, update) if dispatch.client in attackers else update

    return sent


NameTensors = Callable[[Weights], dict[str, Tensor]]
"""Maps a model's weights to named tensors, as in its file and in the user's module."""


@dataclass(frozen=True)
class MakeTrainer:
    """Builds a trainer in a worker process. It is pickled, so it holds settings and no tensors."""

    task: Task
    local: LocalTraining
    seed: int

    def __call__(self) -> Trainer:
        return Trainer(self.task, self.local, bound_network(self.task, self.seed))


@dataclass(frozen=True)
class Simulation:
    """An experiment with its server, transport and evaluation, ready to run."""

    experiment: Experiment
    server: Server[Any]
    transport: VirtualTransport
    runtimes: ClientRuntimes
    layout: Layout
    named: NameTensors
    evaluate_weights: Callable[[Weights], dict[str, float]]
    execution: Execution = field(default_factory=Execution)
    """With the number of workers that were actually started."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The digest of each input file, by name."""

    def evaluate(self) -> dict[str, float]:
        """The task's scores of the current model."""
        return self.evaluate_weights(self.server.model.weights)


def bound_network(task: Task, seed: int) -> BoundNetwork:
    module = task.network(derive(seed, "network"))
    return Layout.of(module).bind(module)


def tensor_names_of(task: Task, network: BoundNetwork) -> NameTensors:
    """Return the function that names a model's tensors as the task's module loads them.

    It includes frozen tensors, except for tasks with their own file format: of a LoRA model only the adapters are kept.
    """
    return network.layout.named if isinstance(task, Saves) else network.full_state.named


@contextmanager
def assembled(
    experiment: Experiment, execution: Execution | None = None, say: Callable[[str], None] = lambda text: None
) -> Iterator[Simulation]:
    """Build the simulation of an experiment. Its workers are stopped when the context ends."""
    execution = execution or Execution()
    if execution.on_gpu:
        with _on_gpu(experiment, execution, say) as simulation:
            yield simulation
        return
    network = bound_network(experiment.task, experiment.seed)
    inputs = inputs_of(experiment, experiment.task)
    runtimes = runtimes_of(experiment)
    server = server_of(experiment, network)
    runner = _executor(experiment, execution, network, runtimes, say)
    try:
        sent = outgoing_updates(experiment, network.layout, network.weights.params.device)
        transport, evaluate = _transport(experiment, runner, runtimes, sent), evaluation_of(experiment.task, network)
        ran_on = with_actual_workers(execution, runner)
        named = tensor_names_of(experiment.task, network)
        yield Simulation(experiment, server, transport, runtimes, network.layout, named, evaluate, ran_on, inputs)
    finally:
        runner.close()


@contextmanager
def _on_gpu(experiment: Experiment, execution: Execution, say: Callable[[str], None]) -> Iterator[Simulation]:
    from fedecho.runs.on_gpu import GpuParts, MakeJobRunner, gpu_settings, select_gpu

    if experiment.attack.poisons_data:
        raise ValueError(
            f"attack.kind = {experiment.attack.kind!r} poisons data, which is not supported on the GPU: use serial or pool"
        )
    precision, device = execution.arithmetic, select_gpu()
    with gpu_settings(precision, device):
        parts = GpuParts(experiment, precision, device, say)
        inputs = inputs_of(experiment, parts.task)
        if parts.one_by_one:
            say(f"training one client at a time with captured steps: {parts.one_by_one}")
        runtimes = runtimes_of(experiment)
        server = server_of(experiment, parts.network, parts.student)
        layout, wanted = parts.network.layout, _wanted(experiment, runtimes)
        if execution.executor == "cuda":
            runner = parts.executor(execution.num_workers, wanted)
        else:
            make = MakeJobRunner(replace(experiment, task=_fresh(experiment.task)), precision)
            runner = start_workers(execution, make, layout, wanted, say, device)
        try:
            transport = _transport(experiment, runner, runtimes, outgoing_updates(experiment, layout, device))
            ran_on = with_actual_workers(execution, runner)
            named = tensor_names_of(parts.task, parts.network)
            yield Simulation(experiment, server, transport, runtimes, layout, named, parts.evaluate, ran_on, inputs)
        finally:
            runner.close()


def runtimes_of(experiment: Experiment) -> ClientRuntimes:
    """Assign each client its runtime, based on its number of examples. Flooding attackers report instantly."""
    task = experiment.task
    sizes = np.fromiter((task.num_examples(client) for client in range(task.num_clients)), np.int64, task.num_clients)
    runtimes = experiment.runtimes.assign(sizes, experiment.seed)
    return FloodedRuntimes(runtimes, attackers_of(experiment)) if experiment.attack.kind == "flood" else runtimes


def inputs_of(experiment: Experiment, task: Task) -> Mapping[str, str]:
    """Read the task's inputs up front, so that errors surface early. Returns a digest per input.

    ``task`` is the experiment's task, possibly moved to a device.
    """
    distills = distiller_of(experiment) is not None
    if distills:
        check_unlabeled(task.num_unlabeled)
    return task.read_inputs(distills) if isinstance(task, HasInputs) else {}


def distiller_of(experiment: Experiment) -> Distiller | None:
    return experiment.algorithm.distiller if distils(experiment.algorithm) else None


def server_of(experiment: Experiment, network: BoundNetwork, make_student: Callable[[], Student] | None = None) -> Server[Any]:
    """Build the server. ``make_student`` makes the student of a method that distills (default: on the CPU)."""
    algorithm = experiment.algorithm
    if distils(algorithm):
        algorithm = algorithm.attached(
            student_for(network, experiment.task, algorithm.distiller) if make_student is None else make_student()
        )
    variances = network.layout.variances(network.weights.params.device)
    if experiment.privacy.on and experiment.privacy.where == "server":
        algorithm = Noised(inner=algorithm, privacy=experiment.privacy, seed=experiment.seed, variances=variances)
    return Server(
        algorithm=algorithm,
        model=GlobalModel(0, network.layout.pack(network.module)),
        num_clients=experiment.task.num_clients,
        concurrency=experiment.concurrency,
        seed=experiment.seed,
        admission=experiment.admission,
        variances=variances,
    )


def evaluation_of(task: Task, network: BoundNetwork) -> Callable[[Weights], dict[str, float]]:
    def evaluate(weights: Weights) -> dict[str, float]:
        network.load(weights)
        return scores_of(task, network.module)

    return evaluate


def _transport(
    experiment: Experiment, executor: Executor, runtimes: ClientRuntimes, sent: UpdateTransform = unchanged
) -> VirtualTransport:
    return VirtualTransport(
        executor=executor,
        runtimes=runtimes,
        num_clients=experiment.task.num_clients,
        seed=experiment.seed,
        faults=experiment.faults,
        client_memory=experiment.client_memory,
        client_memory_dir=experiment.client_memory_dir,
        sent=sent,
    )


def _executor(
    experiment: Experiment, execution: Execution, network: BoundNetwork, runtimes: ClientRuntimes, say: Callable[[str], None]
) -> Executor:
    task, local = training_task(experiment), experiment.local_training
    if execution.executor == "serial":
        trainer = Trainer(task, local, network)
        return SerialExecutor(lambda job: trainer.train(job.dispatch, job.control))
    make = MakeTrainer(_fresh(task), local, experiment.seed)
    return start_workers(execution, make, network.layout, _wanted(experiment, runtimes), say)


def _fresh(task: Task) -> Task:
    """A copy without cached data: each worker reads the data itself."""
    return replace(task) if is_dataclass(task) and not isinstance(task, type) else task


def _wanted(experiment: Experiment, runtimes: ClientRuntimes) -> Set[int] | None:
    schedule = forecast_of(experiment, runtimes)
    return None if schedule is None else schedule.answered


def forecast_of(
    experiment: Experiment, runtimes: ClientRuntimes | None = None, watch: Callable[[Moment], None] = lambda moment: None
) -> Forecast | None:
    """Simulate the schedule of the whole run without training. None if the method has no fixed buffer size."""
    if experiment.buffer_size is None:
        return None
    client_runtimes = runtimes or runtimes_of(experiment)
    return forecast(
        buffer_size=experiment.buffer_size,
        demands=demands(experiment.algorithm),
        num_clients=experiment.task.num_clients,
        concurrency=experiment.concurrency,
        seed=experiment.seed,
        num_versions=experiment.num_versions,
        dispatch_after_step=experiment.dispatch_after_step,
        make_transport=lambda executor: _transport(experiment, executor, client_runtimes),
        watch=watch,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because sums over several threads round differently. Results are then bit-identical."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""What a method costs the server: what the paper's section on server costs reports, measured here."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fedecho.algorithms.fedecho import Echo, FedEcho
from fedecho.core.drive import drive
from fedecho.core.memory import ClientMemory
from fedecho.core.types import Weights
from fedecho.experiments.build import assembled, forecast_of, one_thread
from fedecho.experiments.execution import Execution
from fedecho.experiments.experiment import Experiment


@dataclass(frozen=True)
class ServerCost:
    """Seconds per version on this machine; memory over the whole run, by its schedule."""

    inference_s: float
    distillation_s: float
    versions_alive: int
    versions_bytes: int
    bank_bytes: int
    state_bytes: int
    """All else that the method keeps: buffers, moments, and, of all clients, their cached updates."""


class _Stopwatch:
    """Times calls, and waits for the device so that what is queued is counted."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self._settle()
            began = time.perf_counter()
            result = work(*arguments)
            self._settle()
            self.seconds += time.perf_counter() - began
            return result

        return timed

    @staticmethod
    def _settle() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def server_cost(experiment: Experiment, execution: Execution, num_versions: int) -> ServerCost:
    """Run ``num_versions`` versions after one to warm up, and look ahead over the schedule of the whole run."""
    schedule = forecast_of(experiment)
    peak = 1 if schedule is None else schedule.peak_alive
    with one_thread(), assembled(experiment, execution) as simulation:
        algorithm = simulation.server.algorithm
        student = algorithm.student if isinstance(algorithm, FedEcho) else None
        drive(simulation.server, simulation.transport, num_versions=1)
        infer, teach = _Stopwatch(), _Stopwatch()
        if student is not None:
            object.__setattr__(student, "infer", infer.around(student.infer))
            object.__setattr__(student, "teach", teach.around(student.teach))
        drive(simulation.server, simulation.transport, num_versions=1 + num_versions)
        weights, state = simulation.server.model.weights, simulation.server.state
        bank = state.bank if isinstance(state, Echo) else None
    return ServerCost(
        inference_s=infer.seconds / num_versions,
        distillation_s=teach.seconds / num_versions,
        versions_alive=peak,
        versions_bytes=peak * _num_bytes(weights),
        bank_bytes=0 if bank is None else bank.bytes_with(experiment.task.num_clients),
        state_bytes=held(state, experiment.task.num_clients, but=bank),
    )


def _num_bytes(weights: Weights) -> int:
    return weights.params.nbytes + weights.buffers.nbytes


def held(state: Any, num_clients: int, but: Any = None) -> int:
    """Bytes of the tensors in a state, ``but`` those of one part of it, once so many clients have been heard."""
    if state is None or state is but:
        return 0
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, ClientMemory):
        return num_clients * state.row_bytes
    if is_dataclass(state) and not isinstance(state, type):
        return sum(held(getattr(state, part.name), num_clients, but) for part in fields(state))
    if isinstance(state, list | tuple):
        return sum(held(part, num_clients, but) for part in state)
    return sum(held(part, num_clients, but) for part in state.values()) if isinstance(state, dict) else 0

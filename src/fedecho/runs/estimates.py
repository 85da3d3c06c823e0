"""Estimates before a run starts: its schedule and the method's cost on the server."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedecho.algorithms.fedecho import FedEcho, FedEchoState
from fedecho.core.loop import Moment, drive
from fedecho.core.types import Weights
from fedecho.runs.build import assembled, forecast_of, one_thread, runtimes_of
from fedecho.runs.config import ConfigError
from fedecho.runs.execution import Execution
from fedecho.runs.experiment import Experiment
from fedecho.simulation.runtimes import NAMES
from fedecho.storage.client_memory import ClientMemory


@dataclass(frozen=True)
class ClassReports:
    """One runtime class: how often its clients report, and the versions that receive their first updates."""

    name: str
    num_clients: int
    num_reports: int
    never_heard: int
    first_version: int | None
    """The version that receives the class's first update. None if no client of the class reports."""
    last_first_version: int | None
    """The version by which every reporting client has reported once."""
    mean_staleness: float | None
    max_staleness: int | None


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run up to its last version, assuming no update is rejected: a rejection shifts all that follows."""

    num_versions: int
    virtual_s: float
    versions_alive: int
    classes: tuple[ClassReports, ...]
    first_versions: dict[int, int]
    """For each client, the version that receives its first update."""


def schedule_of(experiment: Experiment) -> Schedule:
    """Simulate the schedule from the experiment's seed, clients and runtimes, without training."""
    runtimes = runtimes_of(experiment)
    staleness: dict[str, list[int]] = {}
    first: dict[int, int] = {}
    reached, ended = 0, 0.0

    def note(moment: Moment) -> None:
        nonlocal reached, ended
        receipt = moment.receipt
        if receipt.status == "accepted":
            staleness.setdefault(runtimes.class_of(receipt.client), []).append(receipt.staleness)
            first.setdefault(receipt.client, receipt.base_version + receipt.staleness + 1)
        if moment.step is not None:
            reached, ended = moment.step.model.version, moment.time

    forecast = forecast_of(experiment, runtimes, note)
    if forecast is None:
        raise ConfigError(
            f"{type(experiment.algorithm).__name__} has no buffer_size attribute, so its schedule cannot be predicted"
        )
    if reached < experiment.num_versions:
        raise ConfigError(f"no client reports after version {reached} of {experiment.num_versions}: check [faults]")
    members: dict[str, list[int]] = {}
    for client in range(experiment.task.num_clients):
        members.setdefault(runtimes.class_of(client), []).append(client)
    classes = (_reports(name, members[name], first, staleness.get(name, [])) for name in _fastest_first(members))
    return Schedule(reached, ended, forecast.peak_alive, tuple(classes), first)


def _reports(name: str, clients: list[int], first: dict[int, int], staleness: list[int]) -> ClassReports:
    first_versions = [first[client] for client in clients if client in first]
    return ClassReports(
        name=name,
        num_clients=len(clients),
        num_reports=len(staleness),
        never_heard=len(clients) - len(first_versions),
        first_version=min(first_versions, default=None),
        last_first_version=max(first_versions, default=None),
        mean_staleness=fmean(staleness) if staleness else None,
        max_staleness=max(staleness, default=None),
    )


def _fastest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (NAMES.index(name) if name in NAMES else len(NAMES), name))


@dataclass(frozen=True)
class ServerCost:
    """The method's cost on the server: seconds per version on this machine, and peak memory over the whole run."""

    inference_s: float
    distillation_s: float
    versions_alive: int
    versions_bytes: int
    bank_bytes: int
    state_bytes: int
    """The rest of the method's state: buffers, moments and the cached updates of all clients."""


class _Stopwatch:
    """Times calls, synchronizing with the GPU so that queued work is included."""

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
    """Measure ``num_versions`` versions after one warm-up version. Peak memory follows from the predicted schedule."""
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
        bank = state.bank if isinstance(state, FedEchoState) else None
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
    """Bytes of the tensors in a state once ``num_clients`` clients have reported. ``but`` is a part that is not counted."""
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

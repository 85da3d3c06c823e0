"""What a run will do, before it starts: who reports when, and what the method costs the server."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedecho.algorithms.fedecho import Echo, FedEcho
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
    """The clients of one runtime class: how often they report, and into which versions their first updates go."""

    name: str
    num_clients: int
    num_reports: int
    never_heard: int
    first_version: int | None
    """None if nobody of them reports."""
    last_first_version: int | None
    """When all that report have done so once."""
    mean_staleness: float | None
    max_staleness: int | None


@dataclass(frozen=True)
class Schedule:
    """Of a run up to its last version. A rejected update shifts the rest of a real run; nothing is rejected here."""

    num_versions: int
    virtual_s: float
    versions_alive: int
    classes: tuple[ClassReports, ...]
    first_versions: dict[int, int]
    """Client: the version that its first update goes into."""


def schedule_of(experiment: Experiment) -> Schedule:
    """What comes when, by the experiment's own seed, clients and runtimes."""
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

    found = forecast_of(experiment, runtimes, note)
    if found is None:
        raise ConfigError(
            f"{type(experiment.algorithm).__name__} does not say its buffer_size, so its schedule is not known ahead"
        )
    if reached < experiment.num_versions:
        raise ConfigError(f"nobody reports any more after version {reached} of {experiment.num_versions}: see [faults]")
    members: dict[str, list[int]] = {}
    for client in range(experiment.task.num_clients):
        members.setdefault(runtimes.class_of(client), []).append(client)
    classes = (_reports(name, members[name], first, staleness.get(name, [])) for name in _fastest_first(members))
    return Schedule(reached, ended, found.peak_alive, tuple(classes), first)


def _reports(name: str, clients: list[int], first: dict[int, int], staleness: list[int]) -> ClassReports:
    heard = [first[client] for client in clients if client in first]
    return ClassReports(
        name=name,
        num_clients=len(clients),
        num_reports=len(staleness),
        never_heard=len(clients) - len(heard),
        first_version=min(heard, default=None),
        last_first_version=max(heard, default=None),
        mean_staleness=fmean(staleness) if staleness else None,
        max_staleness=max(staleness, default=None),
    )


def _fastest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (NAMES.index(name) if name in NAMES else len(NAMES), name))


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

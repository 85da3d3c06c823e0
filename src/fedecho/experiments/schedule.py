"""Who reports when, known before anything is trained: a schedule hangs on draws alone and not on what is learnt."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fedecho.core.drive import Moment
from fedecho.experiments.build import forecast_of, runtimes_of
from fedecho.experiments.config import ConfigError
from fedecho.experiments.experiment import Experiment
from fedecho.simulation.runtimes import NAMES


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

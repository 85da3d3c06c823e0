"""``Experiment``: a whole run as one frozen object whose fields are the very objects that run."""

import re
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any

from fedecho.core.admission import Admission
from fedecho.core.algorithm import Algorithm, check_algorithm, demands
from fedecho.core.memory import Place, check_place
from fedecho.core.ranges import InFlight, Seed, Versions, at_least, check_ranges
from fedecho.core.task import Task, defines
from fedecho.learning.local import LocalTraining
from fedecho.learning.privacy import Privacy
from fedecho.simulation.attacks import Attack
from fedecho.simulation.faults import Faults
from fedecho.simulation.runtimes import Runtimes


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is learnt, by which method, by whom and for how long. How it is computed (executor, workers) changes no result."""

    task: Task
    algorithm: Algorithm[Any]
    local: LocalTraining
    concurrency: InFlight
    num_versions: Versions
    name: str = "experiment"
    seed: Seed = 0
    runtimes: Runtimes = field(default_factory=Runtimes)
    faults: Faults = field(default_factory=Faults)
    admission: Admission = field(default_factory=Admission)
    privacy: Privacy = field(default_factory=Privacy)
    attack: Attack = field(default_factory=Attack)
    dispatch_after_step: bool = False
    eval_every: Annotated[int, at_least(1)] = 1
    client_memory: Place = "cpu"
    """Where clients' control variates live in a simulation (FedAC)."""
    client_memory_dir: str | None = None
    """The folder of that file, if ``client_memory`` is "file"; by default that of temporary files."""
    record_every: Annotated[int, at_least(1)] | None = None
    """The record has every so many jobs, for runs of millions; None is all of them. Versions and evaluations are all there."""

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name must be letters, digits, dots, dashes and underscores, got {self.name!r}")
        check_ranges(self)
        check_place(self.client_memory, self.client_memory_dir, "client_memory", "client_memory_dir")
        self._share_seed()
        if self.local.control_variates and not demands(self.algorithm).control_variates:
            raise ValueError(
                "local.control_variates needs a method that sends a correction (fedac), which switches it on by itself"
            )
        if self.local.correct_once:
            raise ValueError("local.correct_once is switched on by FedAC: set algorithm.correction=once in its place")
        if not self.local_training.control_variates and (self.local.corrected != "gradient" or not self.local.correct_unseen):
            raise ValueError(
                "local.corrected and local.correct_unseen say how control variates correct a client's steps, and this method has "
                "none (fedac has): leave them out"
            )
        self._check_privacy()
        self._check_target()
        check_clients(self.algorithm, self.task.num_clients, self.concurrency)

    @property
    def buffer_size(self) -> int | None:
        """M, or None for a user's own method that does not say."""
        told = getattr(self.algorithm, "buffer_size", None)
        return None if told is None else int(told)

    @property
    def local_training(self) -> LocalTraining:
        """The clients' settings with what the algorithm asks of them."""
        asked = demands(self.algorithm)
        return replace(
            self.local,
            proximal=self.local.proximal or asked.proximal,
            control_variates=self.local.control_variates or asked.control_variates,
            correct_once=asked.correct_once,
        )

    def _check_privacy(self) -> None:
        if not self.privacy.on:
            return
        if (self.record_every or 1) > 1:
            raise ValueError(
                "record_every must be left out where privacy is on: every client's epsilon is counted from the record"
            )
        if self.local_training.control_variates:
            raise ValueError(
                "privacy does not cover control variates: set algorithm.control_variates=false or use another method"
            )
        if self.privacy.where == "server" and defines(self.algorithm, "attached"):
            raise ValueError(
                "privacy.where='server' covers the buffer but not FedEcho's teachers, which see each update: use 'client'"
            )

    def _check_target(self) -> None:
        if not self.attack.target:  # a class of every task, and that of a user who did not choose
            return
        num_classes = getattr(self.task, "num_classes", None)
        if num_classes is not None and self.attack.target >= num_classes:
            raise ValueError(
                f"attack.target is {self.attack.target}, but the task has {num_classes} classes: "
                f"choose one from 0 to {num_classes - 1}"
            )

    def _share_seed(self) -> None:
        for name in ("task", "algorithm"):
            object.__setattr__(self, name, with_seed(getattr(self, name), self.seed))


def check_clients(algorithm: Any, num_clients: int, concurrency: int) -> None:
    """Do a method's buffer and memory fit the number of clients, and of those at work at once?"""
    buffer_size, told = getattr(algorithm, "buffer_size", None), _innermost(algorithm, "num_clients")
    if not 1 <= concurrency <= num_clients:
        raise ValueError(f"concurrency must be between 1 and task.num_clients = {num_clients}, got {concurrency}")
    if buffer_size is not None and buffer_size > concurrency:
        raise ValueError(
            f"a buffer_size of {buffer_size} is more than a concurrency of {concurrency} can fill at once: "
            "raise concurrency or lower buffer_size"
        )
    if buffer_size is not None and demands(algorithm).synchronous and buffer_size != concurrency:
        raise ValueError(
            f"a synchronous algorithm waits for all its clients: concurrency must equal buffer_size = {buffer_size}, "
            f"got {concurrency}"
        )
    if told is not None and told != num_clients:
        raise ValueError(f"algorithm.num_clients is {told}, but the task has {num_clients} clients")


def with_seed(part: Any, seed: int) -> Any:
    """A task or a method with no seed of its own takes the run's."""
    unseeded = is_dataclass(part) and not isinstance(part, type) and getattr(part, "seed", seed) is None
    return replace(part, seed=seed) if unseeded else part


def _innermost(algorithm: Any, name: str) -> Any:
    """The field of an algorithm, or of the method it wraps."""
    while not hasattr(algorithm, name) and hasattr(algorithm, "inner"):
        algorithm = algorithm.inner
    return getattr(algorithm, name, None)

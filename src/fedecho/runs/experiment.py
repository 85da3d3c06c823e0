"""``Experiment``: all settings of a run as one frozen object."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from math import isfinite
from types import FunctionType
from typing import Annotated, Any

from torch import nn

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.core.admission import Admission
from fedecho.core.algorithm import Algorithm, buffer_size_of, check_algorithm, demands
from fedecho.core.ranges import InFlight, Seed, Versions, at_least, check_ranges
from fedecho.core.task import HasClasses, Seeded, Task
from fedecho.distill.student import distils
from fedecho.learning.local import LocalTraining
from fedecho.learning.privacy import Privacy
from fedecho.simulation.attacks import Attack
from fedecho.simulation.faults import Faults
from fedecho.simulation.runtimes import Runtimes
from fedecho.storage.client_memory import MemoryPlace, check_memory_place


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The task, method, clients and length of a run. Execution options (executor, workers) are not part of it."""

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
    client_memory: MemoryPlace = "cpu"
    """Where a simulation keeps the clients' control variates (FedAC)."""
    client_memory_dir: str | None = None
    """The folder of that file if ``client_memory`` is "file" (default: the folder for temporary files)."""
    record_every: Annotated[int, at_least(1)] | None = None
    """Record only every n-th job, for runs of millions (None: all). Versions and evaluations are always recorded."""

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name must be letters, digits, dots, dashes and underscores, got {self.name!r}")
        check_ranges(self)
        check_memory_place(self.client_memory, self.client_memory_dir, "client_memory", "client_memory_dir")
        self._share_seed()
        if self.local.control_variates and not demands(self.algorithm).control_variates:
            raise ValueError(
                "local.control_variates needs a method that sends a correction (fedac), which enables it automatically: omit it"
            )
        if self.local.correct_once:
            raise ValueError("local.correct_once is enabled by FedAC: set algorithm.correction=once instead")
        if not self.local_training.control_variates and (self.local.corrected != "gradient" or not self.local.correct_unseen):
            raise ValueError(
                "local.corrected and local.correct_unseen need a method with control variates (fedac): leave them out"
            )
        self._check_privacy()
        self._check_target()
        self._check_attackers()
        check_clients(self.algorithm, self.task.num_clients, self.concurrency)

    @property
    def buffer_size(self) -> int | None:
        """The method's buffer size M, or None for a user's own method without one."""
        return buffer_size_of(self.algorithm)

    @property
    def local_training(self) -> LocalTraining:
        """The local training settings, with the algorithm's demands applied."""
        needs = demands(self.algorithm)
        return replace(
            self.local,
            proximal=self.local.proximal or needs.proximal,
            control_variates=self.local.control_variates or needs.control_variates,
            correct_once=needs.correct_once,
        )

    def _check_privacy(self) -> None:
        if not self.privacy.on:
            return
        if (self.record_every or 1) > 1:
            raise ValueError(
                "record_every cannot be combined with privacy, because each client's epsilon is counted from the record: omit it"
            )
        if self.local_training.control_variates:
            raise ValueError(
                "privacy does not cover control variates: set algorithm.control_variates=false, or use another method"
            )
        if self.privacy.where == "server" and distils(self.algorithm):
            raise ValueError(
                "privacy.where='server' protects the buffer but not FedEcho's teachers, which see every update: use 'client'"
            )

    def _check_target(self) -> None:
        if not self.attack.target:  # class 0, the default, exists in every task
            return
        if isinstance(self.task, HasClasses) and self.attack.target >= self.task.num_classes:
            raise ValueError(
                f"attack.target is {self.attack.target}, but the task has {self.task.num_classes} classes: "
                f"choose one from 0 to {self.task.num_classes - 1}"
            )

    def _check_attackers(self) -> None:
        """A share of 0 asks for nobody; one that comes to nobody would show a defence that holds."""
        attack, num_clients = self.attack, self.task.num_clients
        if attack.kind != "none" and attack.share and not attack.attackers(num_clients, self.seed):
            raise ValueError(
                f"attack.share is {attack.share}, which of {num_clients} clients is less than one: "
                f"choose at least {1 / num_clients}, or attack.kind=none"
            )

    def _share_seed(self) -> None:
        for name in ("task", "algorithm"):
            object.__setattr__(self, name, with_seed(getattr(self, name), self.seed))


def check_clients(algorithm: Any, num_clients: int, concurrency: int) -> None:
    """Check a method's buffer size and client memory against the number of clients and the concurrency."""
    buffer_size, expected_clients = buffer_size_of(algorithm), _innermost(algorithm, "num_clients")
    if not 1 <= concurrency <= num_clients:
        raise ValueError(f"concurrency must be between 1 and task.num_clients = {num_clients}, got {concurrency}")
    if buffer_size is not None and buffer_size > concurrency:
        raise ValueError(
            f"buffer_size is {buffer_size}, but only {concurrency} clients train at once: "
            "raise concurrency or lower buffer_size"
        )
    if buffer_size is not None and demands(algorithm).synchronous and buffer_size != concurrency:
        raise ValueError(
            f"a synchronous algorithm waits for all its clients: concurrency must equal buffer_size = {buffer_size}, "
            f"got {concurrency}"
        )
    if expected_clients is not None and expected_clients != num_clients:
        raise ValueError(f"algorithm.num_clients is {expected_clients}, but the task has {num_clients} clients")


def with_seed(part: Any, seed: int) -> Any:
    """Give a task or method the run's seed unless it has its own."""
    unseeded = is_dataclass(part) and not isinstance(part, type) and isinstance(part, Seeded) and part.seed is None
    return replace(part, seed=seed) if unseeded else part


def _innermost(algorithm: Any, name: str) -> Any:
    """A field of an algorithm, or of the innermost method it wraps."""
    while not hasattr(algorithm, name) and hasattr(algorithm, "inner"):
        algorithm = algorithm.inner
    return getattr(algorithm, name, None)


MAX_NORM_RATIO = 3.0
"""Updates above this multiple of the usual norm are rejected. Honest norms differ less, by the clients' amounts of data."""


def defended(experiment: Experiment) -> Experiment:
    """Enable the defenses against poisoned updates.

    Updates above three times the usual norm are rejected, the rest are clipped to the buffer's median norm, teachers are
    trimmed, and BatchNorm statistics are aggregated by median. CA2FL and FedAsync do not clip; a user's own method gets the
    norm bound only. See docs/security.md.
    """
    admission = replace(experiment.admission, max_norm_ratio=MAX_NORM_RATIO)
    return replace(experiment, admission=admission, algorithm=_defended(experiment.algorithm))


def _defended(algorithm: Any) -> Any:
    match algorithm:
        case FedEcho(distiller=distiller, inner=inner):
            return replace(algorithm, distiller=replace(distiller, teacher="trimmed"), inner=_defended(inner))
        case FedBuff() | FADAS() | FedAvg() | FedAC():
            return replace(algorithm, combine="clipped")
        case CA2FL() | FedAsync():
            return replace(algorithm, statistics="median")
        case _:
            return algorithm


MOST_ITEMS = 100
"""Longer lists are taken as data, not settings: only their length is described."""
SHORT_LIST, SHORT_TEXT = 10, 200
"""The same limits for lists and texts outside of dataclass fields."""
DEPTH = 2
"""How many levels of nested objects are inspected, not counting dataclass fields."""


def describe(value: Any) -> Any:
    """Describe a value as a tree that survives a JSON round trip.

    Class names come without their module, because a script's module is ``__main__`` only while it runs.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else repr(value)  # nan is unequal even to itself
    if isinstance(value, list | tuple):
        return [describe(item) for item in value] if len(value) <= MOST_ITEMS else {"class": "list", "len": len(value)}
    if isinstance(value, Mapping) and len(value) <= MOST_ITEMS and all(isinstance(key, str) for key in value):
        return {key: describe(child) for key, child in value.items()}
    tree: dict[str, Any] = {"class": type(value).__name__}
    if is_dataclass(value):
        tree |= {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.repr}
    return tree


def attributes(value: Any, path: str = "", depth: int = DEPTH, written: bool = True) -> dict[str, Any]:
    """Collect what ``describe`` leaves out, by dotted path: attributes of objects and classes, names and defaults of functions.

    Only public attributes with plain values: numbers, short texts and short lists. ``written`` means that the plain fields of
    ``value`` are already in ``describe``.
    """
    found: dict[str, Any] = {}
    for name, child in _members(value).items():
        child_path = f"{path}.{name}" if path else name
        in_tree = written and _is_record(value)
        if _is_plain(child):
            found |= {} if in_tree and name in _fields(value) else {child_path: describe(child)}
        elif in_tree and _is_record(child):
            found |= attributes(child, child_path, depth)
        else:
            found |= {} if in_tree and _name(child) == type(child).__name__ else {child_path: _name(child)}
            found |= attributes(child, child_path, depth - 1, False) if depth and not isinstance(child, nn.Module) else {}
    return found


def _members(value: Any) -> dict[str, Any]:
    """The members, by name, in which two values of this type may differ."""
    if isinstance(value, FunctionType):
        return dict(_bound(value))
    if isinstance(value, partial):
        return {"func": value.func, **{str(index): each for index, each in enumerate(value.args)}, **value.keywords}
    if isinstance(value, type | list | tuple | Mapping):
        return {}
    every = {name: each for base in reversed(type(value).__mro__) for name, each in vars(base).items()}
    of_class = {name: each for name, each in every.items() if name[0] != "_" and _is_plain(each)}
    if _is_record(value):
        of_fields = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
        return {name: each for name, each in of_class.items() if name not in _fields(value)} | of_fields
    # An instance attribute that shadows a non-plain class member is a cached property's value: left out.
    own = {name: each for name, each in getattr(value, "__dict__", {}).items() if name in of_class or name not in every}
    return of_class | {name: each for name, each in own.items() if isinstance(name, str) and name[:1] != "_"}


def _bound(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """A function's closure variables and default arguments, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is still empty
            yield name, cell.cell_contents
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _name(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    return value.__qualname__ if isinstance(value, FunctionType | type) else type(value).__name__


def _fields(value: Any) -> set[str]:
    return {f.name for f in fields(value)}


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= SHORT_LIST and all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= SHORT_TEXT)

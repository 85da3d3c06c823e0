"""``Experiment``: a whole run as one frozen object whose fields are its settings."""

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
from fedecho.core.algorithm import Algorithm, check_algorithm, demands
from fedecho.core.ranges import InFlight, Seed, Versions, at_least, check_ranges
from fedecho.core.task import Task, defines
from fedecho.learning.local import LocalTraining
from fedecho.learning.privacy import Privacy
from fedecho.simulation.attacks import Attack
from fedecho.simulation.faults import Faults
from fedecho.simulation.runtimes import Runtimes
from fedecho.storage.client_memory import Place, check_place


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


MAX_NORM_RATIO = 3.0
"""Above it an update is refused: honest ones differ by how much data a client has, attackers by more."""


def defended(experiment: Experiment) -> Experiment:
    """Refuse norms above three times the usual, clip the rest to the buffer's median, and trim the teachers.

    BatchNorm's statistics become a median. CA2FL and FedAsync have no rule for their step and get the median of statistics alone;
    a user's own method gets the bounds on norms alone. docs/security.md has the table.
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
"""A longer list is data and no setting: it is known by its length alone."""
SHORT_LIST, SHORT_TEXT = 10, 200
"""The same of lists and texts that are no fields."""
DEPTH = 2
"""How many objects are looked into, one within the other, beside the fields of dataclasses."""


def described(value: Any) -> Any:
    """A tree that JSON gives back as it was. The module of a class is left out: a script's is ``__main__`` only while it runs."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else repr(value)  # nan is unequal even to itself
    if isinstance(value, list | tuple):
        return [described(item) for item in value] if len(value) <= MOST_ITEMS else {"class": "list", "len": len(value)}
    if isinstance(value, Mapping) and len(value) <= MOST_ITEMS and all(isinstance(key, str) for key in value):
        return {key: described(child) for key, child in value.items()}
    tree: dict[str, Any] = {"class": type(value).__name__}
    if is_dataclass(value):
        tree |= {f.name: described(getattr(value, f.name)) for f in fields(value) if f.repr}
    return tree


def attributes(value: Any, path: str = "", depth: int = DEPTH, written: bool = True) -> dict[str, Any]:
    """What ``described`` leaves out, by dotted path: public attributes of objects and classes, names and defaults of functions.

    Only plain values: numbers, short texts and short lists. ``written`` says that plain fields are in ``described`` already.
    """
    found: dict[str, Any] = {}
    for name, child in _members(value).items():
        place = f"{path}.{name}" if path else name
        there = written and _is_record(value)
        if _is_plain(child):
            found |= {} if there and name in _fields(value) else {place: described(child)}
        elif there and _is_record(child):
            found |= attributes(child, place, depth)
        else:
            found |= {} if there and _name(child) == type(child).__name__ else {place: _name(child)}
            found |= attributes(child, place, depth - 1, False) if depth and not isinstance(child, nn.Module) else {}
    return found


def _members(value: Any) -> dict[str, Any]:
    """What may differ from one such value to another, by name."""
    if isinstance(value, FunctionType):
        return dict(_bound(value))
    if isinstance(value, partial):
        return {"func": value.func, **{str(place): each for place, each in enumerate(value.args)}, **value.keywords}
    if isinstance(value, type | list | tuple | Mapping):
        return {}
    every = {name: each for base in reversed(type(value).__mro__) for name, each in vars(base).items()}
    of_class = {name: each for name, each in every.items() if name[0] != "_" and _is_plain(each)}
    if _is_record(value):
        of_fields = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
        return {name: each for name, each in of_class.items() if name not in _fields(value)} | of_fields
    # What the class defines otherwise than as a plain value is computed and kept: a cached property.
    own = {name: each for name, each in getattr(value, "__dict__", {}).items() if name in of_class or name not in every}
    return of_class | {name: each for name, each in own.items() if isinstance(name, str) and name[:1] != "_"}


def _bound(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has besides its code: the variables it closes over, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is still empty
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

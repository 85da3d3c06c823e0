"""A Ray actor: it keeps a workbench and trains what it is sent."""

import os
import pickle
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.executors.executor import Bench, Job, bench_of, told
from fedecho.executors.worker import Failed
from fedecho.learning.trainer import Trainer
from fedecho.storage.files import source_sha256
from fedecho.version import __version__

Array = np.ndarray[tuple[int], np.dtype[np.float32]]
Arrays = tuple[Array, Array, Array | None]
"""Params, buffers and c of a model; or delta, buffers and dc_i of an update. Ray carries arrays without copying them."""


@dataclass(frozen=True, slots=True)
class Errand:
    """A job without its tensors."""

    number: int
    client: int
    version: int
    seed: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """An update on its way to the server."""

    num_examples: float
    num_steps: int
    metrics: Mapping[str, float]
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Of the process that runs the experiment: where its folder is there, relative paths mean the same to an actor."""

    folder: str
    modules: tuple[str, ...]
    """Where a user's own task may be imported from."""
    variables: Mapping[str, str]

    @classmethod
    def here(cls) -> "Surroundings":
        variables = {name: value for name, value in os.environ.items() if name.startswith("FEDECHO_")}
        return cls(str(Path.cwd()), tuple(str(Path(place).absolute()) for place in sys.path), variables)

    def enter(self) -> None:
        os.environ.update(self.variables)
        sys.path.extend(place for place in self.modules if place not in sys.path and Path(place).exists())
        if Path(self.folder).is_dir():
            os.chdir(self.folder)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is there."""

    host: str
    process: int
    software: Mapping[str, str]


class Seat:
    """One core or one GPU."""

    def __init__(self, pickled: bytes, surroundings: Surroundings) -> None:
        """``pickled`` makes the bench, and is read when its modules can be found."""
        torch.set_num_threads(1)
        surroundings.enter()
        self._error = ""
        try:
            make: Callable[[], Trainer | Bench] = pickle.loads(pickled)  # noqa: S301 (of the process that started this one)
            self._bench = bench_of(make())
        except Exception as error:
            self._error = told(error)

    def hello(self) -> Hello | str:
        """Or why it could not start."""
        return self._error or Hello(platform.node(), os.getpid(), software())

    def take(self, errand: Errand, model: Arrays, control: Array | None) -> None:
        params, buffers, correction = model
        weights = Weights(_seen(params), _seen(buffers))
        base = GlobalModel(errand.version, weights, None if correction is None else _seen(correction))
        dispatch = Dispatch(errand.number, errand.client, base, errand.seed)
        self._bench.take(Job(dispatch, None if control is None else _seen(control)))

    def give(self, errand: Errand) -> Parcel | Failed:
        update = self._bench.give(errand.number)
        if isinstance(update, str):
            return Failed(errand.number, errand.client, update)
        arrays = arrays_of(update.delta, update.buffers, update.correction)
        return Parcel(update.num_examples, update.num_steps, dict(update.metrics), arrays)

    def run(self, errand: Errand, model: Arrays, control: Array | None) -> Parcel | Failed:
        self.take(errand, model, control)
        return self.give(errand)


def software() -> dict[str, str]:
    """What must be the same everywhere, an edit of our source too: else a client's update would depend on where it was made."""
    versions = {"fedecho": __version__, "torch": torch.__version__.partition("+")[0], "numpy": np.__version__}
    return {**versions, "source": source_sha256()[:16], "python": platform.python_version()}


def arrays_of(first: Tensor, buffers: Tensor, last: Tensor | None) -> Arrays:
    return first.cpu().numpy(), buffers.cpu().numpy(), None if last is None else last.cpu().numpy()


def _seen(array: Array) -> Tensor:
    """A view of the cluster's memory. It cannot be written to, which torch would warn of; nobody writes to a published model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)

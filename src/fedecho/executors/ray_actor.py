"""The Ray actor that trains clients, and the messages it exchanges with the executor."""

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
from fedecho.executors.executor import Job, JobRunner, error_text, job_runner
from fedecho.executors.worker import Failed
from fedecho.learning.trainer import Trainer
from fedecho.storage.files import source_sha256
from fedecho.version import __version__

Array = np.ndarray[tuple[int], np.dtype[np.float32]]
Arrays = tuple[Array, Array, Array | None]
"""Params, buffers and c of a model, or delta, buffers and dc_i of an update. Ray transfers numpy arrays without copying them."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job's metadata, without tensors."""

    number: int
    client: int
    version: int
    seed: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """A client update as numpy arrays."""

    num_examples: float
    num_steps: int
    metrics: Mapping[str, float]
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class Environment:
    """Working folder, import path and FEDECHO_* variables of the driver process, so that an actor resolves paths the same way."""

    folder: str
    modules: tuple[str, ...]
    """The import path, for a user's own task."""
    variables: Mapping[str, str]

    @classmethod
    def current(cls) -> "Environment":
        variables = {name: value for name, value in os.environ.items() if name.startswith("FEDECHO_")}
        return cls(str(Path.cwd()), tuple(str(Path(entry).absolute()) for entry in sys.path), variables)

    def apply(self) -> None:
        """Adopt the environment in this process; a folder that does not exist here is skipped."""
        os.environ.update(self.variables)
        sys.path.extend(entry for entry in self.modules if entry not in sys.path and Path(entry).exists())
        if Path(self.folder).is_dir():
            os.chdir(self.folder)


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """An actor's host, process id and software versions."""

    host: str
    process: int
    software: Mapping[str, str]


class Actor:
    """A Ray actor with one core or one GPU."""

    def __init__(self, pickled: bytes, environment: Environment) -> None:
        """``pickled`` is the trainer factory; it is unpickled after ``environment`` has made its modules importable."""
        torch.set_num_threads(1)
        environment.apply()
        self._error = ""
        try:
            make: Callable[[], Trainer | JobRunner] = pickle.loads(pickled)  # noqa: S301 (sent by the driver process)
            self._runner = job_runner(make())
        except Exception as error:
            self._error = error_text(error)

    def info(self) -> ActorInfo | str:
        """Return what this actor runs on, or why it could not start."""
        return self._error or ActorInfo(platform.node(), os.getpid(), software())

    def start(self, request: JobRequest, model: Arrays, control: Array | None) -> None:
        params, buffers, correction = model
        weights = Weights(_view(params), _view(buffers))
        base = GlobalModel(request.version, weights, None if correction is None else _view(correction))
        dispatch = Dispatch(request.number, request.client, base, request.seed)
        self._runner.start(Job(dispatch, None if control is None else _view(control)))

    def finish(self, request: JobRequest) -> JobResult | Failed:
        update = self._runner.finish(request.number)
        if isinstance(update, str):
            return Failed(request.number, request.client, update)
        arrays = arrays_of(update.delta, update.buffers, update.correction)
        return JobResult(update.num_examples, update.num_steps, dict(update.metrics), arrays)

    def run(self, request: JobRequest, model: Arrays, control: Array | None) -> JobResult | Failed:
        self.start(request, model, control)
        return self.finish(request)


def software() -> dict[str, str]:
    """Versions that must match on every node, including a hash of our source: results must not depend on the node."""
    versions = {"fedecho": __version__, "torch": torch.__version__.partition("+")[0], "numpy": np.__version__}
    return {**versions, "source": source_sha256()[:16], "python": platform.python_version()}


def arrays_of(first: Tensor, buffers: Tensor, last: Tensor | None) -> Arrays:
    return first.cpu().numpy(), buffers.cpu().numpy(), None if last is None else last.cpu().numpy()


def _view(array: Array) -> Tensor:
    """View an array of Ray's object store. Torch would warn that it is read-only, but nothing writes to a published model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)

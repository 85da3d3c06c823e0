"""The executor protocol, the serial reference, and the workbench that a worker keeps between jobs."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.learning.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """A dispatch beside the client's control variate c_i (None is zero)."""

    dispatch: Dispatch
    control: Tensor | None = None


class Executor(Protocol):
    """Computes jobs. The result of a job does not depend on when or where that happens."""

    def submit(self, job: Job, due: float) -> None:
        """Take a job whose result will be asked for at virtual time ``due``. Returns at once."""
        ...

    def result(self, number: int) -> ClientUpdate:
        """The result of dispatch ``number``, waiting for it if need be."""
        ...

    def cancel(self, number: int) -> None:
        """Nobody will ask for this one."""
        ...

    def close(self) -> None: ...


class SerialExecutor:
    """A job is computed when its result is due, so that nothing is trained that falls past the end of the run."""

    def __init__(self, train: Callable[[Job], ClientUpdate]) -> None:
        self._train = train
        self._jobs: dict[int, Job] = {}

    def submit(self, job: Job, due: float) -> None:
        self._jobs[job.dispatch.number] = job

    def result(self, number: int) -> ClientUpdate:
        return self._train(self._jobs.pop(number))

    def cancel(self, number: int) -> None:
        self._jobs.pop(number, None)

    def close(self) -> None:
        self._jobs.clear()


CPU = torch.device("cpu")


class Bench:
    """Takes jobs whose tensors lie in host memory, and gives their results. Its own executor may run several at once.

    ``settings`` hold for as long as the bench lives.
    """

    def __init__(self, layout: Layout, executor: Executor, device: torch.device = CPU, settings: object = None) -> None:
        self.layout = layout
        self.settings = settings
        self._executor = executor
        self._device = device
        self._versions: dict[int, int] = {}
        self._models: dict[int, GlobalModel] = {}
        self._failures: dict[int, str] = {}
        self._taken = 0

    def take(self, job: Job) -> None:
        """Never raises: what goes wrong is told by ``give``."""
        dispatch = job.dispatch
        try:
            placed = Dispatch(dispatch.number, dispatch.client, self._model(dispatch), dispatch.seed)
            control = None if job.control is None else job.control.to(self._device)
            self._taken += 1
            self._executor.submit(Job(placed, control), float(self._taken))
        except Exception as error:
            self._failures[dispatch.number] = told(error)

    def give(self, number: int) -> ClientUpdate | str:
        """The result of a job that was taken, or what went wrong."""
        try:
            return self._failures.pop(number) if number in self._failures else self._executor.result(number)
        except Exception as error:
            return told(error)
        finally:
            self._release(self._versions.pop(number))

    def _model(self, dispatch: Dispatch) -> GlobalModel:
        """The job's model on the device. It goes up once for all jobs from it that are held here at the same time."""
        model = dispatch.model
        self._versions[dispatch.number] = model.version
        if model.version not in self._models:
            weights = Weights(model.weights.params.to(self._device), model.weights.buffers.to(self._device))
            correction = None if model.correction is None else model.correction.to(self._device)
            self._models[model.version] = GlobalModel(model.version, weights, correction)
        return self._models[model.version]

    def _release(self, version: int) -> None:
        if version not in self._versions.values():
            self._models.pop(version, None)


def bench_of(made: Trainer | Bench) -> Bench:
    """A plain trainer works through its jobs one by one."""
    if isinstance(made, Bench):
        return made
    return Bench(made.network.layout, SerialExecutor(lambda job: made.train(job.dispatch, job.control)))


def told(error: Exception) -> str:
    """In a line; for what is no mistake of the user's, as ``fedecho`` sees it, the traceback below it."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ValueError | OSError | MemoryError):
        return line
    return f"{line}\n{''.join(traceback.format_exception(error))}"

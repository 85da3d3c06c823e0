"""The executor protocol, the serial reference executor, and the job runner inside a worker."""

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
    """A dispatch and the client's control variate c_i (None means zero)."""

    dispatch: Dispatch
    control: Tensor | None = None


class Executor(Protocol):
    """Computes jobs. A job's result does not depend on when or where it is computed."""

    def submit(self, job: Job, due: float) -> None:
        """Accept a job whose result is due at virtual time ``due``. Returns at once."""

    def result(self, number: int) -> ClientUpdate:
        """Return the result of dispatch ``number``; wait for it if necessary."""

    def cancel(self, number: int) -> None:
        """Discard a job whose result is no longer needed."""

    def close(self) -> None: ...


class SerialExecutor:
    """Computes each job when its result is due, so it never trains a job that falls past the end of the run."""

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


class JobRunner:
    """Runs jobs whose tensors are in host memory, on its own executor and device.

    ``settings`` is an open context (such as GPU settings) that is kept alive with this object.
    """

    def __init__(self, layout: Layout, executor: Executor, device: torch.device = CPU, settings: object = None) -> None:
        self.layout = layout
        self.settings = settings
        self._executor = executor
        self._device = device
        self._versions: dict[int, int] = {}
        self._models: dict[int, GlobalModel] = {}
        self._failures: dict[int, str] = {}
        self._num_started = 0

    def start(self, job: Job) -> None:
        """Start a job. Never raises: ``finish`` reports any error."""
        dispatch = job.dispatch
        try:
            placed = Dispatch(dispatch.number, dispatch.client, self._model(dispatch), dispatch.seed)
            control = None if job.control is None else job.control.to(self._device)
            self._num_started += 1
            self._executor.submit(Job(placed, control), float(self._num_started))
        except Exception as error:
            self._failures[dispatch.number] = error_text(error)

    def finish(self, number: int) -> ClientUpdate | str:
        """Wait for a started job; return its update or the error text."""
        try:
            return self._failures.pop(number) if number in self._failures else self._executor.result(number)
        except Exception as error:
            return error_text(error)
        finally:
            self._release(self._versions.pop(number))

    def _model(self, dispatch: Dispatch) -> GlobalModel:
        """Return the job's model on the device; jobs that start from the same version share one copy."""
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


def job_runner(trainer: Trainer | JobRunner) -> JobRunner:
    """Wrap a plain trainer so that it runs its jobs one at a time; return anything else unchanged."""
    if isinstance(trainer, JobRunner):
        return trainer
    return JobRunner(trainer.network.layout, SerialExecutor(lambda job: trainer.train(job.dispatch, job.control)))


def error_text(error: Exception) -> str:
    """Format an error as one line, followed by the traceback unless the error is a user's mistake."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ValueError | OSError | MemoryError):
        return line
    return f"{line}\n{''.join(traceback.format_exception(error))}"

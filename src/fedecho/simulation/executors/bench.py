"""What a worker keeps from job to job: data, a network and an executor of its own, on the CPU or on its GPU."""

import traceback

import torch

from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.learning.trainer import Trainer
from fedecho.simulation.executors.executor import Executor, Job
from fedecho.simulation.executors.serial import SerialExecutor

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

"""One job at a time, in this process: the reference."""

from collections.abc import Callable

from fedecho.core.types import ClientUpdate
from fedecho.simulation.executors.executor import Job


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

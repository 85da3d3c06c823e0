"""What an executor is: jobs go in as they are dispatched, results come out as the clock asks for them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedecho.core.types import ClientUpdate, Dispatch


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

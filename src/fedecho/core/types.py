"""The messages and models that travel between the server, the transport and the clients. All are frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from torch import Tensor

S = TypeVar("S")
CLIENT_FAILED = "client failed"
"""The code of a loss caused by the client itself. It counts as a strike, as a rejection does."""
LOST, GONE, UNREADABLE = "lost", "client went away", "unreadable"
"""The default codes of losses and of unreadable answers."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model as two flat vectors: trainable parameters, and running statistics that are averaged by value."""

    params: Tensor
    buffers: Tensor

    def clone(self) -> "Weights":
        return Weights(self.params.clone(), self.buffers.clone())


@dataclass(frozen=True, slots=True)
class GlobalModel:
    """x_t: one published version. Its tensors must not be written to. ``correction`` is FedAC's c."""

    version: int
    weights: Weights
    correction: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The server's request to one client: train from ``model`` with the random seed ``seed``.

    ``number`` counts the dispatches of a run. It breaks ties between equal times and addresses this job's random draws.
    """

    number: int
    client: int
    model: GlobalModel
    seed: int


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """Delta_i = y_i - x_{s_i} as reported by a client. Untrusted until the server admits it."""

    client: int
    base_version: int
    delta: Tensor
    buffers: Tensor
    num_examples: float
    """The client's weight in weighted averages. Flower clients may report a fraction."""
    num_steps: int
    correction: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lost:
    """A dispatched client will not report: it dropped out, went away or failed.

    Losses are counted by ``code``, one of a few fixed texts. ``reason`` may add details such as the client's error message.
    """

    client: int
    reason: str
    code: str = LOST

    def __post_init__(self) -> None:
        _check_code(self)


@dataclass(frozen=True, slots=True)
class Refused:
    """A dispatched client answered with something that is not a readable update."""

    client: int
    reason: str
    code: str = UNREADABLE

    def __post_init__(self) -> None:
        _check_code(self)


@dataclass(frozen=True, slots=True)
class Joined:
    """A client became available for selection."""

    client: int


@dataclass(frozen=True, slots=True)
class Left:
    """A client became unavailable until it joins again. Its open job, if any, is lost."""

    client: int
    reason: str = "client went away"
    code: str = GONE

    def __post_init__(self) -> None:
        _check_code(self)


def _check_code(message: Lost | Refused | Left) -> None:
    if not message.code or type(message.code) is not str:
        raise ValueError(
            f"the code of {type(message).__name__} from client {message.client} must be a non-empty string, got {message.code!r}"
        )


Message = ClientUpdate | Lost | Refused | Joined | Left


class Status(StrEnum):
    """How the server handled a message."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    LOST = "lost"
    JOINED = "joined"
    LEFT = "left"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An admitted update with the model it started from and the current model. Only the server creates these."""

    update: ClientUpdate
    base: GlobalModel
    current: GlobalModel

    @property
    def staleness(self) -> int:
        """tau = t - s, in versions."""
        return self.current.version - self.base.version


@dataclass(frozen=True, slots=True)
class Advance(Generic[S]):
    """The result of a step: the next state, x_{t+1} and metrics for the record."""

    state: S
    weights: Weights
    correction: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

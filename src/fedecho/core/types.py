"""The nouns of the system, all frozen: what travels between the server, the transport and the clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

S = TypeVar("S")
CLIENT_FAILED = "client failed"
"""The code of a loss by the client's own doing: it counts against the client as a refusal does."""
LOST, GONE, UNREADABLE = "lost", "client went away", "unreadable"
"""The codes of losses and refusals that name no narrower one."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model as two flat vectors: what is optimised, and running statistics that are averaged by value."""

    params: Tensor
    buffers: Tensor

    def clone(self) -> "Weights":
        return Weights(self.params.clone(), self.buffers.clone())


@dataclass(frozen=True, slots=True)
class GlobalModel:
    """x_t: one published version. Nobody writes to its tensors. ``correction`` is FedAC's c."""

    version: int
    weights: Weights
    correction: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The server's order to one client: train from ``model`` with the randomness of ``seed``.

    ``number`` counts the dispatches of a run. It breaks ties of the clock and addresses the draws of this one job.
    """

    number: int
    client: int
    model: GlobalModel
    seed: int


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """Delta_i = y_i - x_{s_i} as a client reports it. Untrusted until the server admits it."""

    client: int
    base_version: int
    delta: Tensor
    buffers: Tensor
    num_examples: float
    """How much the client counts where updates are weighted; a fraction where a Flower client says one."""
    num_steps: int
    correction: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lost:
    """A dispatched client will not report: it dropped out, went away or failed.

    Losses are counted by ``code``, one of a few fixed texts; ``reason`` may say more, such as numbers or a client's own error.
    """

    client: int
    reason: str
    code: str = LOST

    def __post_init__(self) -> None:
        _check_code(self)


@dataclass(frozen=True, slots=True)
class Refused:
    """A dispatched client answered with something that cannot be read as an update."""

    client: int
    reason: str
    code: str = UNREADABLE

    def __post_init__(self) -> None:
        _check_code(self)


@dataclass(frozen=True, slots=True)
class Joined:
    """A client can be chosen from now on."""

    client: int


@dataclass(frozen=True, slots=True)
class Left:
    """A client cannot be chosen until it joins again. A job it had open is lost."""

    client: int
    reason: str = "client went away"
    code: str = GONE

    def __post_init__(self) -> None:
        _check_code(self)


def _check_code(message: Lost | Refused | Left) -> None:
    if not message.code or type(message.code) is not str:
        raise ValueError(
            f"{type(message).__name__} of client {message.client} needs a code to be counted by, got {message.code!r}"
        )


Message = ClientUpdate | Lost | Refused | Joined | Left


@dataclass(frozen=True, slots=True)
class Arrival:
    """An admitted update beside the model it started from and the model of now. Only the server's admission makes one."""

    update: ClientUpdate
    base: GlobalModel
    current: GlobalModel

    @property
    def staleness(self) -> int:
        """tau = t - s, in versions."""
        return self.current.version - self.base.version


@dataclass(frozen=True, slots=True)
class Advance(Generic[S]):
    """What a step gives: the state to go on with, x_{t+1}, and numbers for the record."""

    state: S
    weights: Weights
    correction: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

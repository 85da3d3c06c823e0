"""The event loop of Algorithm 1. It drives the server; the transport owns the clock and the network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fedecho.core.server import Receipt, Server, Step
from fedecho.core.types import Dispatch, Message


class Transport(Protocol):
    """Delivers dispatches to clients and returns their messages, in the order of its own clock."""

    @property
    def now(self) -> float:
        """Seconds since the run began, virtual or real."""
        ...

    def send(self, dispatch: Dispatch) -> None: ...

    def receive(self) -> Message:
        """Wait for the next message."""
        ...


class SentDispatch(NamedTuple):
    """A dispatch that was sent, as the record stores it."""

    time: float
    number: int
    client: int
    base_version: int


@dataclass(frozen=True, slots=True)
class Moment:
    """One processed message and its results, for the record, the progress display and the evaluation.

    ``sent`` are the dispatches since the previous moment. The first moment includes those that started the run.
    """

    time: float
    receipt: Receipt
    step: Step | None
    sent: tuple[SentDispatch, ...] = ()


def drive(
    server: Server[Any],
    transport: Transport,
    *,
    num_versions: int,
    watch: Callable[[Moment], bool | None] = lambda moment: None,
    dispatch_after_step: bool = False,
) -> None:
    """Run Algorithm 1 until version T (``num_versions``) or until ``watch`` returns True.

    Newly selected clients get x_t, before the step (lines 6 and 7 of the paper), or x_{t+1} with ``dispatch_after_step``.
    """
    sent = _send(server, transport)
    while server.model.version < num_versions:
        receipt = server.receive(transport.receive())
        ready = server.ready
        if not (ready and dispatch_after_step):
            sent += _send(server, transport)
        step = server.advance() if ready else None
        if step is not None and step.model.version < num_versions:
            sent += _send(server, transport)
        if watch(Moment(transport.now, receipt, step, sent)):
            return
        sent = ()


def _send(server: Server[Any], transport: Transport) -> tuple[SentDispatch, ...]:
    dispatches = server.refill()
    if not dispatches:
        return ()
    for dispatch in dispatches:
        transport.send(dispatch)
    now = transport.now
    return tuple([SentDispatch(now, d.number, d.client, d.model.version) for d in dispatches])

"""The grid of a real SuperLink, with an end to waiting for it: one that is gone must not leave its ServerApp behind.

Flower asks a SuperLink that does not answer again and again, for ever. It notices the end of the process that started it instead,
unless that process is still listed (a zombie, as in a container without an init) or was never on this machine.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

GO_ON = "submit the app again with the same run folder to go on"

Answer = TypeVar("Answer")


class SuperLinkGoneError(ConnectionError):
    """Nothing can be asked of nodes any more. What is saved is whole."""


class SuperLink:
    """What a transport needs of a grid. After ``gone_s`` seconds without an answer the SuperLink is gone."""

    def __init__(self, grid: Grid, gone_s: float) -> None:
        self._grid = grid
        self._gone_s = gone_s
        retries = getattr(grid, "_retry_invoker", None)  # of flwr's HttpGrid, which has no setting for it
        if retries is not None:
            retries.max_time = gone_s

    def get_node_ids(self) -> list[int]:
        return self._asked(lambda: list(self._grid.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return self._asked(lambda: list(self._grid.push_messages(messages)))

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        return self._asked(lambda: list(self._grid.pull_messages(numbers)))

    def _asked(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except httpx.TransportError as error:
            raise SuperLinkGoneError(f"no answer from the SuperLink for {self._gone_s:g} s ({error}): {GO_ON}") from error
        except RunNotRunningException as error:
            raise SuperLinkGoneError(f"the SuperLink has ended this run: {GO_ON}") from error

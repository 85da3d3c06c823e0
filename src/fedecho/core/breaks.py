"""Breaks in long work: there it says how far it is, and there it can be stopped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Told = Callable[[int, int], None]
"""Told how much is done of how much; it may raise ``Stopped``."""
_TOLD: ContextVar[Told | None] = ContextVar("told", default=None)


class Stopped(Exception):  # noqa: N818 (no error)
    """Somebody asked for a stop; what was begun is left undone."""


def at(done: int, total: int) -> None:
    """For an evaluation of many parts to call between them. Where nobody watches, nothing happens."""
    told = _TOLD.get()
    if told is not None:
        told(done, total)


@contextmanager
def watched(told: Told) -> Iterator[None]:
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)

"""Breaks in long work: there it says how far it is, and there it can be stopped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watch = Callable[[int, int], None]
"""Told how much is done of how much; it may raise ``Stopped``."""
_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


class Stopped(Exception):  # noqa: N818 (no error)
    """Somebody asked for a stop; what was begun is left undone."""


def at(done: int, total: int) -> None:
    """For an evaluation of many parts to call between them. Where nobody watches, nothing happens."""
    watch = _WATCH.get()
    if watch is not None:
        watch(done, total)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)

"""Ctrl-C and SIGTERM: a request to stop between two moments."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_asked: threading.Event | None = None
"""Of the run in this process's main thread."""


def ask_to_stop() -> None:
    """As the first Ctrl-C would; asked again, whether by this or by a signal to all of a terminal's processes, nothing changes."""
    if _asked is not None:
        _asked.set()


@contextmanager
def stop_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) asks for a stop between two moments; the second one interrupts at once."""
    global _asked
    asked, others = threading.Event(), _asked
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        say("stopping after the client that is training now, or within the evaluation; once more to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    _asked = asked
    try:
        yield asked.is_set
    finally:
        _asked = others
        for number, handler in before.items():
            signal.signal(number, handler)

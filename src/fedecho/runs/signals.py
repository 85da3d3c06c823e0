"""Stop requests (Ctrl-C, SIGTERM), and the detection of out-of-memory errors."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOMEM
from types import FrameType

WORDS = ("out of memory", "allocate memory", "not enough memory", "alloc_failed", "memoryerror")
"""Phrases of out-of-memory errors that have no exception type of their own. Illegal memory accesses do not contain them."""
GUESS = "out of memory?"
"""The guess in messages about workers that died for an unknown reason. Not counted as out of memory."""


class ShortageError(ValueError):
    """A resource is exhausted by other processes. A retry may succeed later."""


def memory_shortage(error: BaseException) -> str:
    """One line about an out-of-memory error. Empty for all other errors."""
    if isinstance(error, ShortageError):
        return str(error)
    text = str(error).strip()
    by_text = isinstance(error, RuntimeError) and any(word in text.lower().replace(GUESS, "") for word in WORDS)
    by_type = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM) or _is_torchs(error)
    return f"not enough memory: {(text.splitlines() or ['allocation failed'])[0]}" if by_text or by_type else ""


def _is_torchs(error: BaseException) -> bool:
    """Without importing torch: an error of torch's comes from a process that has."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


AGAIN_S = 1.0
"""A repeated signal within this time counts as one request: `timeout` signals a process and then its group."""

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
Stop = Callable[[], bool]
"""Whether a stop was requested."""


def ignore_stop_signals() -> None:
    """Ignore stop signals in this process, because its parent decides when runs stop.

    This process gets its own process group, so that signals sent to the parent's group reach neither it nor its children: they
    must keep working until the run has stopped.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # not SIG_IGN, which children would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def stop_signals(say: Callable[[str], None], stop: Stop | None = None) -> Iterator[Stop]:
    """Yield a function that says whether a stop was requested. A second Ctrl-C (or SIGTERM) interrupts at once.

    Signals are left alone if ``stop`` is given, which is then yielded, and outside of the main thread.
    """
    requested, requested_at = threading.Event(), 0.0
    if stop is not None or threading.current_thread() is not threading.main_thread():
        yield stop or requested.is_set
        return

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal requested_at
        if not requested.is_set():
            requested_at = time.monotonic()
            requested.set()
            say("stopping after the current client or evaluation step; press Ctrl-C again to stop at once")
        elif time.monotonic() - requested_at > AGAIN_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, request_stop) for number in STOP_SIGNALS}
    try:
        yield requested.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

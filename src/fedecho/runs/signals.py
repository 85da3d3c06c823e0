"""Stop requests (Ctrl-C, SIGTERM), and out-of-memory errors told apart from other faults."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOMEM
from types import FrameType

import torch

WORDS = ("out of memory", "allocate memory", "not enough memory", "alloc_failed", "memoryerror")
"""Of those who have no error of their own for it, as workers that report one. An illegal access to memory is another matter."""
GUESS = "out of memory?"
"""What is asked of a worker that died, of whatever."""


class ShortageError(ValueError):
    """Others hold what is needed."""


def shortage(error: BaseException) -> str:
    """In one line, or empty if it is something else. Python's own error sometimes has no words."""
    if isinstance(error, ShortageError):
        return str(error)
    text = str(error).strip()
    words = isinstance(error, RuntimeError) and any(word in text.lower().replace(GUESS, "") for word in WORDS)
    kinds = isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM)
    return f"not enough memory: {(text.splitlines() or ['no more could be had'])[0]}" if words or kinds else ""


AGAIN_S = 1.0
"""Within so many seconds the same request may come twice: `timeout` sends its signal to a process and to its group."""

LED = {signal.SIGINT, signal.SIGTERM}
_leader: Callable[[], bool] | None = None


def be_led(asked: Callable[[], bool]) -> None:
    """Another process says by ``asked`` whether the runs of this one shall stop.

    What a terminal or a batch system sends to all processes of a group is then the other's business, and does not reach those
    that are started from here: what they do is not to end before the run has stopped.
    """
    global _leader
    _leader = asked
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # not ignored, which would be inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LED)


@contextmanager
def stop_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) asks for a stop between two moments; the second one interrupts at once."""
    if _leader is not None:
        yield _leader
        return
    asked, asked_at = threading.Event(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if not asked.is_set():
            asked_at = time.monotonic()
            asked.set()
            say("stopping after the client that is training now, or within the evaluation; once more to stop at once")
        elif time.monotonic() - asked_at > AGAIN_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in LED}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""A process that is led by another: work comes by its pipe, and so does the word to stop, and the end of its leader."""

import pickle
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fedecho.experiments.signals import be_led
from fedecho.experiments.state import RunState

Say = Callable[[str], None]
Tell = Callable[[RunState], None]
NEWS_EVERY_S = 0.2


def serve(pipe: Connection) -> None:
    """One piece of work after the other. While at work nothing comes but a stop, or the end of the pipe, which is one too."""
    be_led(pipe.poll)
    with suppress(EOFError, OSError):
        while (order := pipe.recv()) is not None:
            _, work = order
            pipe.send(outcome(work, pipe.send))


def outcome(work: Callable[[Tell, Say], Any], send: Callable[[tuple[str, Any]], None]) -> tuple[str, Any]:
    """What came of it; on the way ``send`` has the news."""
    told, sending = 0.0, threading.Lock()

    def news(kind: str, what: Any) -> None:
        with sending, suppress(OSError):  # who leads may be gone; sinks speak in threads of their own
            send((kind, what))

    def tell(state: RunState) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > NEWS_EVERY_S or state.done:
            told = now
            news("stands", state)

    def say(text: str) -> None:
        news("says", text)

    try:
        return "has done", work(tell, say)
    except BaseException as error:
        return "has failed", _portable(error)


def _portable(error: BaseException) -> BaseException:
    """With its traceback as a note; in other words if it does not travel."""
    where = "".join(traceback.format_exception(error))
    try:
        travelled: BaseException = pickle.loads(pickle.dumps(error))  # noqa: S301 (ours)
    except Exception:
        travelled = RuntimeError(f"{type(error).__name__}: {error}")
    travelled.add_note(where)
    return travelled

"""A process that is led by another: work comes by its pipe, and so does the word to stop, and the end of its leader."""

import pickle
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from fedecho.experiments.signals import be_led
from fedecho.experiments.state import RunState

Say = Callable[[str], None]
Tell = Callable[[RunState], None]
News = tuple[str, Any]
"""That it "stands" so, "says" a word, "has done" its work with a result, or "has failed" with an error and where that was."""
NEWS_EVERY_S = 0.2


def serve(pipe: Connection) -> None:
    """One piece of work after the other. While at work nothing comes but a stop, or the end of the pipe, which is one too."""
    be_led(pipe.poll)
    sending = threading.Lock()

    def send(news: News) -> None:
        with sending:  # sinks speak in threads of their own
            pipe.send(news)

    with pipe, suppress(EOFError, OSError):
        while order := pipe.recv_bytes():
            send(outcome(order, send))


def outcome(order: bytes, send: Callable[[News], None]) -> News:
    """What came of it; until then ``send`` has the news."""
    told, over = 0.0, False

    def news(kind: str, what: Any) -> None:
        if not over:
            with suppress(OSError):  # who leads may be gone
                send((kind, what))

    def tell(state: RunState) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > NEWS_EVERY_S or state.done:
            told = now
            news("stands", state)

    try:
        return "has done", pickle.loads(order)(tell, partial(news, "says"))  # noqa: S301 (our leader's)
    except BaseException as error:
        return "has failed", _portable(error)
    finally:
        over = True


class ElsewhereError(Exception):
    """Where in its process an error was raised: what a reader of a traceback wants to see beside it."""


def _portable(error: BaseException) -> tuple[BaseException, ElsewhereError]:
    """In other words if it does not travel as it is."""
    where = ElsewhereError("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (ours)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), where
    return error, where

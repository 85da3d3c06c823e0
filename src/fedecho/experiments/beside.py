"""Many pieces of work beside each other, a process each: their news come to one place, and one stop is for all."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from queue import Empty
from typing import Any, TypeVar

from fedecho.experiments.run import Interrupted
from fedecho.experiments.signals import ask_to_stop
from fedecho.experiments.state import RunState
from fedecho.simulation.executors.worker import deaf_children

See = Callable[[str, RunState], None]
Say = Callable[[str], None]
Tell = Callable[[RunState], None]
T = TypeVar("T")
NEWS_EVERY_S = 0.2
GO_ON = "the same command goes on where it was"


def beside(works: Mapping[str, Callable[[Tell, Say], T]], *, jobs: int, see: See, say: Say) -> dict[str, T]:
    """Do all the work, ``jobs`` at a time; the first that fails ends the others, which can go on later.

    A piece of work tells how it stands and says what it has to say; ``see`` and ``say`` hear it here, by its label.
    """
    context = multiprocessing.get_context("spawn")
    news: Queue[Any] = context.Queue()
    stop = context.Event()
    with (
        _terminated_as_interrupted(),
        ProcessPoolExecutor(min(jobs, len(works)), context, initializer=_listen, initargs=(news, stop)) as pool,
    ):
        with deaf_children():
            futures = {label: pool.submit(do_one, label, work) for label, work in works.items()}
        try:
            _follow(list(futures.values()), news, see, say)
            return {label: future.result() for label, future in futures.items()}
        except BaseException as error:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise Interrupted(f"a process ended without a word, killed for want of memory perhaps; {GO_ON}") from None
            if isinstance(error, KeyboardInterrupt | Interrupted):
                raise Interrupted(f"stopped; {GO_ON}") from None
            raise


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which a batch system or a container sends, is Ctrl-C here: it stops all in good order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _follow(futures: list[Future[Any]], news: "Queue[Any]", see: See, say: Say) -> None:
    """Pass the news on until all is done, or something has failed: then that, whatever else is still at work."""
    while True:
        failed = next((future for future in futures if future.done() and future.exception()), None)
        over = failed is not None or all(future.done() for future in futures)
        try:
            while True:
                label, told = news.get(timeout=0.05 if over else 0.2)
                say(f"{label}: {told}") if isinstance(told, str) else see(label, told)
        except Empty:
            if failed is not None:
                failed.result()
            if over:
                return


_news: "Queue[Any] | None" = None
_stop: Event | None = None
_orphaned, _at_work = threading.Event(), threading.Lock()


def _listen(news: "Queue[Any]", stop: Event) -> None:
    """In a worker: where to send its news, and how it hears that all shall stop."""
    global _news, _stop
    _news, _stop = news, stop
    news.cancel_join_thread()  # once all shall stop nobody reads, and who waits for a full pipe never ends
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    """A parent that was killed leaves workers behind that nobody would ever end: they keep what they have, and go."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        _orphaned.set()
        with _at_work:
            os._exit(1)


def do_one(label: str, work: Callable[[Tell, Say], T]) -> T:
    """In a worker: one piece of work. It is asked to stop where it tells how it stands."""
    told = 0.0

    def say(text: str) -> None:
        if _news is not None:
            _news.put((label, text))

    def tell(state: RunState) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > NEWS_EVERY_S or state.done:
            told = now
            if _news is not None:
                _news.put((label, state))
            if _shall_stop():
                ask_to_stop()

    with _at_work:
        if _shall_stop():
            raise Interrupted("stopped before it began")
        return work(tell, say)


def _shall_stop() -> bool:
    return _orphaned.is_set() or (_stop is not None and _stop.is_set())

"""``Tracker``: takes numbers off a run's hands at once and gives them to sinks from a thread of its own.

A sink may be slow, fail, or wait for a network for ever: the run goes on, and hears of it in one line.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import TypeVar

from fedecho.core.loop import Moment
from fedecho.tracking.sinks import Sink

ROOM = 10_000
"""Versions that may wait for a slow sink; what comes on top is dropped, the record has it all."""
PATIENCE_S = 15.0

Numbers = dict[str, float]
T = TypeVar("T")


class Tracker:
    """A watch of a run. Opening a sink, too, happens in the thread: it may have to ask a server."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]], say: Callable[[str], None], room: int = ROOM) -> None:
        self._say = say
        self._waiting: queue.Queue[tuple[int, Numbers] | None] = queue.Queue(room)
        self._counts = {"accepted": 0, "rejected": 0, "lost": 0}
        self._stale, self._dropped = 0, 0
        self._thread = threading.Thread(target=self._work, args=(dict(makers),), daemon=True, name="tracking")
        if makers:
            self._thread.start()

    def __call__(self, moment: Moment, scores: Mapping[str, float] | None) -> None:
        receipt = moment.receipt
        if receipt.status in self._counts:
            self._counts[receipt.status] += 1
        if receipt.status == "accepted":
            self._stale += receipt.staleness
        if moment.step is None or not self._thread.is_alive():
            return
        numbers: Numbers = {**moment.step.metrics, **(scores or {}), **self._counts, "virtual_s": moment.time}
        numbers["mean_staleness"] = self._stale / max(self._counts["accepted"], 1)
        self._put(moment.step.model.version, numbers)

    def judged(self, version: int, now: float, scores: Mapping[str, float]) -> None:
        """An evaluation by itself: it was made up for after the run had been stopped in it."""
        if self._thread.is_alive():
            self._put(version, {**scores, "virtual_s": now})

    def _put(self, version: int, numbers: Numbers) -> None:
        try:
            self._waiting.put_nowait((version, numbers))
        except queue.Full:
            self._dropped += 1

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Wait a little for what is under way; a sink that hangs is left behind."""
        if self._dropped:
            self._say(f"tracking was too slow: {self._dropped} versions were not passed on (the record has them)")
        if not self._thread.is_alive():
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=patience_s)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._say("tracking is still busy and is left behind; the run itself is complete")

    def _work(self, makers: dict[str, Callable[[], Sink]]) -> None:
        sinks = {name: sink for name, make in makers.items() if (sink := self._tried(name, make)) is not None}
        while sinks:
            item = self._waiting.get()
            if item is None:
                break
            version, numbers = item
            finite = {name: float(value) for name, value in numbers.items() if _is_number(value)}
            for name, sink in list(sinks.items()):
                if self._tried(name, partial(_logged, sink, version, finite)) is None:
                    del sinks[name]
        for name, sink in sinks.items():
            self._tried(name, sink.close)

    def _tried(self, name: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except ImportError:
            self._say(f"--track {name} does nothing: pip install 'fedecho[{name}]'")
        except Exception as error:
            self._say(f"--track {name} is switched off: {type(error).__name__}: {error}")
        return None


def _logged(sink: Sink, version: int, numbers: Numbers) -> bool:
    sink.log(version, numbers)
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)

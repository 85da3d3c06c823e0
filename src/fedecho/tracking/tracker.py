"""``Tracker``: passes a run's metrics to tracking sinks from a background thread.

A sink that is slow, fails or hangs never delays the run. It is reported in one line.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, TypeVar

from fedecho.tracking.sinks import Sink

if TYPE_CHECKING:
    from fedecho.core.loop import Moment

QUEUE_SIZE = 10_000
"""Versions that may wait for a slow sink. Further ones are dropped; the record has them all."""
CLOSE_TIMEOUT_S = 15.0

Numbers = dict[str, float]
T = TypeVar("T")


class Tracker:
    """A watch that logs each version's metrics. Sinks are also opened in the thread, because they may contact a server."""

    def __init__(
        self, makers: Mapping[str, Callable[[], Sink]], say: Callable[[str], None], queue_size: int = QUEUE_SIZE
    ) -> None:
        self._say = say
        self._waiting: queue.Queue[tuple[int, Numbers] | None] = queue.Queue(queue_size)
        self._counts = {"accepted": 0, "rejected": 0, "lost": 0}
        self._stale, self._dropped = 0, 0
        self._thread = threading.Thread(target=self._work, args=(dict(makers),), daemon=True, name="tracking")
        if makers:
            self._thread.start()

    def __call__(self, moment: "Moment", scores: Mapping[str, float] | None) -> None:
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

    def evaluating(self, done: int, total: int) -> None:
        """The progress of an evaluation is not logged."""

    def late_evaluation(self, version: int, now: float, scores: Mapping[str, float]) -> None:
        """Log an evaluation that was interrupted when the run was stopped and has been made up for."""
        if self._thread.is_alive():
            self._put(version, {**scores, "virtual_s": now})

    def _put(self, version: int, numbers: Numbers) -> None:
        try:
            self._waiting.put_nowait((version, numbers))
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for queued metrics, but not longer than the timeout for a sink that hangs."""
        if self._dropped:
            self._say(f"tracking was too slow: {self._dropped} versions were not logged (the record has them)")
        if not self._thread.is_alive():
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say("tracking did not finish in time and is abandoned; the run itself is complete")

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
            self._say(f"--track {name} is disabled, its package is not installed: pip install 'fedecho[{name}]'")
        except Exception as error:
            self._say(f"--track {name} is disabled: {type(error).__name__}: {error}")
        return None


def _logged(sink: Sink, version: int, numbers: Numbers) -> bool:
    sink.log(version, numbers)
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)

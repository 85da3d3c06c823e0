"""Many runs beside each other: one process each, finished ones kept, stopped ones resumed."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Any

from fedecho.core.checkpoint import write_atomically
from fedecho.experiments.execution import Execution, check_same_arithmetic
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.identity import check_same, config_of, is_finished
from fedecho.experiments.record import RECORD, read_header
from fedecho.experiments.run import Interrupted, simulate
from fedecho.experiments.standstill import DivergedError
from fedecho.experiments.state import Following, RunState
from fedecho.experiments.summary import Summary
from fedecho.simulation.executors.worker import deaf_children
from fedecho.tracking import tracked

See = Callable[[str, RunState], None]
Say = Callable[[str], None]
DIVERGED = "diverged.txt"
NEWS_EVERY_S = 0.2


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    label: str
    experiment: Experiment
    folder: Path
    track: tuple[str, ...] = ()
    execution: Mapping[str, Any] = field(default_factory=dict)
    """How it is computed, in the words of ``simulate``."""

    @property
    def why_diverged(self) -> str:
        """Why it was given up, or empty. Tried again it would only do the same."""
        kept = self.folder / DIVERGED
        return kept.read_text().strip() if kept.exists() else ""


@dataclass(frozen=True)
class Compared:
    """What came of the runs; ``diverged`` says by its label why one was given up."""

    summaries: list[Summary]
    diverged: dict[str, str]


def run_all(plan: list[Planned], *, jobs: int, see: See, say: Say = lambda text: None) -> Compared:
    """Run what is missing, ``jobs`` at a time; one that diverges does not end the others.

    ``see`` is told how each run stands, ``say`` what it has to say.
    """
    for planned in plan:
        if (planned.folder / RECORD).exists():
            check_same(planned.folder, planned.experiment)
            check_same_arithmetic(planned.folder, read_header(planned.folder)["execution"], Execution(**planned.execution))
    missing = [planned for planned in plan if not is_finished(planned.folder) and not planned.why_diverged]
    if missing:
        _run_missing(missing, jobs, see, say)
    diverged = {planned.label: why for planned in plan if (why := planned.why_diverged)}
    return Compared([Summary.read(planned.folder) for planned in plan if planned.label not in diverged], diverged)


def _run_missing(missing: list[Planned], jobs: int, see: See, say: Say) -> None:
    context = multiprocessing.get_context("spawn")
    news: Queue[Any] = context.Queue()
    stop = context.Event()
    with ProcessPoolExecutor(min(jobs, len(missing)), context, initializer=_listen, initargs=(news, stop)) as pool:
        with deaf_children():
            futures = [pool.submit(_run_one, planned) for planned in missing]
        try:
            _follow(futures, news, see, say)
            for future in futures:
                future.result()
        except (KeyboardInterrupt, BrokenProcessPool, Interrupted):
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise Interrupted("stopped; the same command goes on where it was") from None
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _follow(futures: list[Future[None]], news: "Queue[Any]", see: See, say: Say) -> None:
    """Pass the news on until all runs are done or one has failed."""
    while True:
        failed = any(future.done() and not future.cancelled() and future.exception() for future in futures)
        done = all(future.done() for future in futures)
        try:
            while True:
                label, told = news.get(timeout=0.05 if done or failed else 0.2)
                say(f"{label}: {told}") if isinstance(told, str) else see(label, told)
        except Empty:
            if done or failed:
                return


_news: "Queue[Any] | None" = None
_stop: Event | None = None


def _listen(news: "Queue[Any]", stop: Event) -> None:
    """In a worker: where to send its news, and how it hears that all shall stop."""
    global _news, _stop
    _news, _stop = news, stop


def _run_one(planned: Planned) -> None:
    told, asked = 0.0, False
    if _stop is not None and _stop.is_set():
        raise Interrupted("stopped before it began")

    def say(text: str) -> None:
        if _news is not None:
            _news.put((planned.label, text))

    def tell(state: RunState) -> None:
        nonlocal told, asked
        now = time.monotonic()
        if now - told > NEWS_EVERY_S or state.done:
            told = now
            if _news is not None:
                _news.put((planned.label, state))
            if _stop is not None and _stop.is_set() and not asked:
                asked = True  # twice would mean at once
                signal.raise_signal(signal.SIGTERM)  # as if it had been asked itself

    with tracked(planned.track, planned.folder, config_of(planned.experiment), say) as tracker:
        watch = Following(planned.folder, RunState(planned.experiment.num_versions), tell, also=tracker)
        begun = (planned.folder / RECORD).exists()
        try:
            simulate(planned.experiment, out=planned.folder, resume=begun, watch=watch, say=say, **planned.execution)
        except DivergedError as error:
            write_atomically(planned.folder / DIVERGED, f"{error}\n".encode())

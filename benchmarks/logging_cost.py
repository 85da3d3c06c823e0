"""Measure the cost of logging as a share of the CPU time of one digits run.

    python -m benchmarks.logging_cost

First inside one run: the CPU time of every call that records, follows or tracks, and of the sink's own thread, beside that of
all the rest. Then, as a check, whole runs in turns with one that writes nothing. CPU time, because other processes of a busy
machine take wall time from whoever is running.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.arguments import at_least_one
from fedecho import Experiment, load, simulate
from fedecho.core.loop import drive
from fedecho.runs.build import assembled, one_thread
from fedecho.runs.evaluation import TimedTransport
from fedecho.runs.record import Record
from fedecho.runs.run_stats import ProgressWatch, RunState
from fedecho.tracking import Tracker, tracked

LIMIT = 1.02


class Spent:
    """CPU seconds of the calls around which it was put, each in its own thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, cls: type[Any], name: str) -> Any:
        work: Callable[..., Any] = getattr(cls, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - began

        return patch.object(cls, name, timed)


def bare(experiment: Experiment) -> None:
    """The run and its evaluations; nothing is written anywhere."""
    with one_thread(), assembled(experiment) as simulation:

        def watch(moment: Any) -> None:
            if moment.step is not None and moment.step.model.version % experiment.eval_every == 0:
                simulation.evaluate()

        drive(simulation.server, simulation.transport, num_versions=experiment.num_versions, watch=watch)


def logged(experiment: Experiment, sinks: tuple[str, ...]) -> None:
    """The record, the state for the progress display, and the sinks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with tracked(sinks, out) as tracker:
            follow = ProgressWatch(out, RunState(experiment.num_versions), lambda state: None)

            def watch(moment: Any, scores: Any) -> None:
                tracker(moment, scores)
                follow(moment, scores)

            simulate(experiment, out=out, watch=watch)


def cpu_seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def inside(experiment: Experiment, sinks: tuple[str, ...]) -> float:
    spent = Spent()
    parts = [(Record, name) for name in ("moment", "evaluation", "sync", "lines")]
    parts += [(Tracker, "__call__"), (Tracker, "_work"), (ProgressWatch, "__call__"), (TimedTransport, "served")]
    patches = [spent.around(cls, name) for cls, name in parts]
    for one in patches:
        one.start()
    total = cpu_seconds(lambda: logged(experiment, sinks))
    for one in patches:
        one.stop()
    return total / (total - spent.seconds)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=at_least_one, default=5)
    repeats = parser.parse_args().repeats
    experiment = load("digits", algorithm="fedecho")
    logged(load("digits", versions=2), ("tensorboard",))  # imports
    for sinks in ((), ("tensorboard",)):
        ratio = median(inside(experiment, sinks) for _ in range(3))
        print(f"inside one run, {' and '.join(('record', *sinks))}: ratio {ratio:.4f}, at most {LIMIT}")
    pairs = [(cpu_seconds(lambda: bare(experiment)), cpu_seconds(lambda: logged(experiment, ()))) for _ in range(repeats)]
    ratios = sorted(ours / nothing for nothing, ours in pairs)
    print(f"whole runs in turns, record beside nothing: ratio {median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()

"""Seconds per update with 1, 2 and 4 worker processes, training included."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.derived import rounded
from benchmarks.scaling.measure import summed_up
from benchmarks.slopes import power_law
from fedecho import Experiment, load
from fedecho.core.loop import Moment, drive
from fedecho.executors.executor import Executor
from fedecho.executors.pool import PoolExecutor
from fedecho.runs.build import MakeTrainer, assembled

JOBS = {"two epochs of a CNN": ["task.width=64", "local.batch_size=32"], "one step on 2 samples": ["task.width=1"]}
UPDATES = {"two epochs of a CNN": 40, "one step on 2 samples": 600}


def workers_axis(size: Any, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """A point is a fresh pool. Its workers know no end of the run, so they are as far ahead at the last mark as at the first."""
    if not size.workers:
        return []
    found = []
    for name, settings in JOBS.items():
        experiment = load("digits", algorithm="fedbuff", versions=100_000, settings=settings)
        if "one step" in name:
            experiment = replace(experiment, local=replace(experiment.local, num_local_steps=1, batch_size=2))
        times = np.zeros((size.worker_rounds, len(size.workers) + 1))
        for number in range(size.worker_rounds):
            for place, workers in enumerate([0, *size.workers]):
                times[number, place] = seconds_per_update(experiment, workers, UPDATES[name])
            told("workers")
        found.append(_series(name, size.workers, times))
    return found


def seconds_per_update(experiment: Experiment, workers: int, updates: int) -> float:
    """Between the arrival that ends the warm-up and the last; ``workers`` 0 is the serial executor."""
    with assembled(experiment) as simulation:
        if workers:
            task = replace(experiment.task)  # type: ignore[type-var]
            maker = MakeTrainer(task, experiment.local_training, experiment.seed)
            pool: Executor = PoolExecutor(num_workers=workers, layout=simulation.layout, make_trainer=maker)
            simulation.transport.executor = pool
        marks: list[float] = []
        warm_up = 12 * max(workers, 1)

        def watch(moment: Moment) -> bool:
            marks.append(time.perf_counter())
            return len(marks) > warm_up + updates

        try:
            drive(simulation.server, simulation.transport, num_versions=experiment.num_versions, watch=watch)
        finally:
            if workers:
                pool.close()
    return (marks[-1] - marks[warm_up]) / updates


def _series(name: str, workers: list[int], times: np.ndarray) -> dict[str, Any]:
    """Fitted up to the number of cores. Two points leave no residual, so the error is that of the mean over rounds."""
    found = summed_up([0, *workers], times)
    serial, pools = found[0], found[1:]
    cores = max(2, os.cpu_count() or 1)
    within = [place for place, number in enumerate(workers) if number <= cores]
    x = [float(workers[place]) for place in within]
    lines = [power_law(x, row[[place + 1 for place in within]].tolist()) for row in times]
    spread = float(np.std([line.exponent for line in lines], ddof=1)) / len(lines) ** 0.5 if len(lines) > 1 else None
    middle = power_law(x, [pools[place].seconds for place in within])
    fit = {"from": x[0], "to": x[-1], "exponent": round(middle.exponent, 3), "scale": rounded(middle.scale)}
    fit["error"] = None if spread is None else round(spread, 3)
    return {
        "name": name,
        "unit": "s per update",
        "x": [float(number) for number in workers],
        "y": [rounded(one.seconds) for one in pools],
        "low": [rounded(one.low) for one in pools],
        "high": [rounded(one.high) for one in pools],
        "serial": rounded(serial.seconds),
        "fit": fit,
    }

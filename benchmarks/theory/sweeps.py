"""The runs: over T, M, the slow clients' runtime and the concurrency, each at several seeds."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.derived import machine, rounded
from benchmarks.slopes import halvings
from benchmarks.theory.run import (
    FEDBUFF,
    FEDECHO,
    FIXED_LOCAL,
    STRONG_ECHO,
    Outcome,
    Setting,
    rates_of,
    run_setting,
    the_problem,
)


@dataclass(frozen=True)
class Point:
    """A setting at one place of a sweep."""

    sweep: str
    x: float
    setting: Setting


@dataclass(frozen=True)
class Size:
    """How much is run."""

    versions: list[float]
    buffers: list[float]
    fixed_versions: int
    slow: list[float]
    concurrency: list[float]
    seeds: int


FULL = Size(halvings(256, 8192), halvings(1, 32), 1024, halvings(1, 256, 4), halvings(2, 64), 5)
QUICK = Size(halvings(64, 512), halvings(1, 8), 256, [1, 16], [4, 16], 2)


def points(size: Size) -> list[Point]:
    """All sweeps at seed 0. Over M, Mc = 4 M keeps the staleness; over the rest, M = 2."""
    found = []
    for method in (FEDBUFF, FEDECHO, FIXED_LOCAL, STRONG_ECHO):
        found += [Point("T", t, Setting(method=method, num_versions=int(t))) for t in size.versions]
    for method in (FEDBUFF, FEDECHO):
        plain = Setting(method=method, num_versions=size.fixed_versions)
        found += [Point("M", m, replace(plain, buffer_size=int(m), concurrency=4 * int(m))) for m in size.buffers]
        found += [Point("slow", r, replace(plain, slow=r)) for r in size.slow]
        found += [Point("Mc", c, replace(plain, concurrency=int(c), slow=1.0)) for c in size.concurrency]
    return found


def cost_of(setting: Setting) -> float:
    """Roughly, to begin with the longest."""
    return setting.num_versions * (setting.buffer_size + (8 if setting.method in (FEDECHO, STRONG_ECHO) else 0))


Told = Callable[[int, int], None]


def swept(size: Size, workers: int = 2, told: Told = lambda done, total: None) -> dict[str, Any]:
    """Everything, in ``workers`` processes; the results do not depend on how many."""
    began, places = time.perf_counter(), points(size)
    jobs = [(place, seed) for place in places for seed in range(size.seeds)]
    jobs.sort(key=lambda job: -cost_of(job[0].setting))
    outcomes: dict[tuple[Point, int], Outcome] = {}
    for place, seed, outcome in _outcomes(jobs, workers):
        outcomes[place, seed] = outcome
        told(len(outcomes), len(jobs))
    rows = [row_of(place, [outcomes[place, seed] for seed in range(size.seeds)]) for place in places]
    made = {**machine(), "seconds": round(time.perf_counter() - began), "workers": workers}
    return {"made": made, "problem": constants(size), "rows": rows}


def _outcomes(jobs: list[tuple[Point, int]], workers: int) -> Iterator[tuple[Point, int, Outcome]]:
    """As they are finished; one worker is this process."""
    if workers == 1:
        yield from ((place, seed, run_setting(replace(place.setting, seed=seed))) for place, seed in jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run_setting, replace(place.setting, seed=seed)): (place, seed) for place, seed in jobs}
        for future in as_completed(waiting):
            yield (*waiting[future], future.result())


def row_of(place: Point, outcomes: list[Outcome]) -> dict[str, Any]:
    """A point with the values of all its seeds."""
    return {
        "sweep": place.sweep,
        "method": place.setting.method,
        "x": place.x,
        "mean_square": [rounded(outcome.mean_square) for outcome in outcomes],
        "last_half": [rounded(outcome.last_half) for outcome in outcomes],
        "max_staleness": max(outcome.max_staleness for outcome in outcomes),
        "mean_staleness": rounded(float(np.mean([outcome.mean_staleness for outcome in outcomes])), 3),
        "average_max": rounded(float(np.mean([outcome.average_max for outcome in outcomes])), 3),
    }


def constants(size: Size) -> dict[str, Any]:
    """What the theorem calls constants, and the settings all runs share."""
    problem, plain = the_problem(), Setting(method=FEDECHO, num_versions=int(size.versions[0]))
    rates = rates_of(problem, plain)
    step = rates.server_lr * rates.client_lr * plain.num_local_steps
    return {
        "clients": problem.num_clients,
        "params": problem.num_params,
        "smoothness": rounded(problem.smoothness),
        "variance_within": rounded(problem.variance_within),
        "variance_between": rounded(problem.variance_between),
        "gap": rounded(problem.gap),
        "local_steps": plain.num_local_steps,
        "distill_steps": plain.num_distill_steps,
        "clip_norm": plain.clip_norm,
        "fixed_versions": size.fixed_versions,
        "seeds": size.seeds,
        "largest_condition": rounded(8 * plain.num_local_steps * problem.smoothness * rates.client_lr, 3),
        "step_times_l": rounded(step * problem.smoothness * (size.versions[0] / size.fixed_versions) ** 0.5, 3),
    }

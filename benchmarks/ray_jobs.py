"""Overhead of a job by executor: weights to the worker, the update back, and messages.

    python -m benchmarks.ray_jobs              ResNet-18 (11.2 million parameters, 45 MB) with 2 workers
    python -m benchmarks.ray_jobs --width 1    the same with a network of a few kilobytes: the messages alone

Jobs load their model and answer with the difference to it (45 MB each way) and do no step. Three jobs start from each version.
The executors take turns, and the medians are compared; starting their workers is timed apart.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.arguments import at_least_one
from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.executors.executor import Executor, Job, JobRunner, SerialExecutor
from fedecho.runs.execution import EXECUTORS, Execution, start_workers
from fedecho.tasks.vision.resnet import resnet18

JOBS_PER_VERSION = 3


def network(width: int) -> BoundNetwork:
    module = resnet18(width=width)
    return Layout.of(module).bind(module)


@dataclass(frozen=True)
class MakeIdle:
    """A worker that trains nothing."""

    width: int

    def __call__(self) -> JobRunner:
        bound = network(self.width)
        return JobRunner(bound.layout, SerialExecutor(lambda job: untrained(bound, job)))


def untrained(bound: BoundNetwork, job: Job) -> ClientUpdate:
    base = job.dispatch.model.weights
    bound.load(base)
    delta, buffers = bound.weights.params - base.params, bound.weights.buffers.clone()
    return ClientUpdate(job.dispatch.client, job.dispatch.model.version, delta, buffers, 1, 1)


@contextmanager
def started(name: str, width: int, workers: int) -> Iterator[Executor]:
    if name == "serial":
        bound = network(width)
        yield SerialExecutor(lambda job: untrained(bound, job))
        return
    execution = Execution(executor=name, workers=workers)  # type: ignore[arg-type]
    runner = start_workers(execution, MakeIdle(width), network(width).layout, None, lambda text: None)
    try:
        yield runner
    finally:
        runner.close()


def models(layout: Layout, num: int) -> Iterator[GlobalModel]:
    """Each in memory of its own, as a server's step makes it."""
    for version in range(num):
        yield GlobalModel(version, Weights(torch.full((layout.num_params,), float(version)), torch.zeros(layout.num_buffers)))


def milliseconds(runner: Executor, layout: Layout, jobs: int, in_flight: int) -> float:
    """Per job, with so many under way."""
    began, number = time.perf_counter(), 0
    for model in models(layout, jobs // JOBS_PER_VERSION):
        for _ in range(JOBS_PER_VERSION):
            runner.submit(Job(Dispatch(number, number % 10, model, number)), float(number))
            number += 1
            if number >= in_flight:
                runner.result(number - in_flight)
    for last in range(max(number - in_flight + 1, 0), number):
        runner.result(last)
    return 1e3 * (time.perf_counter() - began) / number


def measure(width: int, workers: int, jobs: int, repeats: int) -> None:
    layout = network(width).layout
    size = 4 * (layout.num_params + layout.num_buffers) / 1e6
    print(
        f"{layout.num_params:,} parameters, {size:.2f} MB to the worker and back; {workers} workers, {jobs} jobs, {repeats} times"
    )
    names = [name for name in EXECUTORS if name != "cuda"]
    starts: dict[str, float] = {}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in names:
            began = time.perf_counter()
            with started(name, width, workers) as runner:
                milliseconds(runner, layout, 6 * JOBS_PER_VERSION, 2 * workers)  # memory touched for the first time is slow
                starts[name] = time.perf_counter() - began
                alone = milliseconds(runner, layout, jobs // 2, 1)
                figures[name].append((alone, milliseconds(runner, layout, jobs, 2 * workers)))
            print(f"  turn {turn + 1}: {name} {figures[name][-1][0]:.1f} and {figures[name][-1][1]:.1f} ms", flush=True)
    middle = {name: [median(column) for column in zip(*figures[name], strict=True)] for name in names}
    for name, (alone, together) in middle.items():
        many = f"{together:7.1f} ms with {2 * workers} under way"
        print(f"{name:7} {alone:7.1f} ms a job one by one, {many}; workers and their memory ready after {starts[name]:.1f} s")
    one, many = (ray / pool for ray, pool in zip(middle["ray"], middle["pool"], strict=True))
    print(f"ray / pool: {one:.2f} one by one, {many:.2f} with {2 * workers} under way")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=at_least_one, default=64, help="of ResNet-18's first layer; 64 is the usual one")
    parser.add_argument("--workers", type=at_least_one, default=2)
    parser.add_argument("--jobs", type=at_least_one, default=120)
    parser.add_argument("--repeats", type=at_least_one, default=3)
    told = parser.parse_args()
    measure(told.width, told.workers, told.jobs, told.repeats)


if __name__ == "__main__":
    main()

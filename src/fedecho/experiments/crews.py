"""The workers of a run: processes of this machine or actors on a Ray cluster."""

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

import torch

from fedecho.core.layout import Layout
from fedecho.experiments.execution import SLOTS, Execution
from fedecho.learning.trainer import Trainer
from fedecho.simulation.executors.bench import CPU, Bench
from fedecho.simulation.executors.crew import DEPTH, Crew
from fedecho.simulation.executors.executor import Executor
from fedecho.simulation.executors.pool import PoolExecutor
from fedecho.simulation.executors.ray import ray_settings


def crew_of(
    execution: Execution,
    make: Callable[[], Trainer | Bench],
    layout: Layout,
    wanted: Set[int] | None,
    say: Callable[[str], None],
    device: torch.device = CPU,
) -> Crew[Any]:
    """Workers that keep what ``make`` gives; their results come to ``device``."""
    # A GPU works on several jobs, and has the next of each at hand.
    depth = DEPTH * SLOTS if execution.on_gpu else DEPTH
    if execution.executor == "pool":
        return PoolExecutor(
            num_workers=execution.num_workers,
            layout=layout,
            make_trainer=make,
            wanted=wanted,
            depth=depth,
            gpus=execution.worker_gpus() if execution.on_gpu else None,
            device=device,
        )
    say("starting Ray on this machine" if execution.address is None else f"joining the Ray cluster at {execution.address}")
    with ray_settings():
        from fedecho.simulation.executors.ray.cluster import Cluster
        from fedecho.simulation.executors.ray.executor import RayExecutor

        cluster = Cluster(execution.address, execution.workers, execution.on_gpu)
    return RayExecutor(cluster=cluster, make_trainer=make, wanted=wanted, depth=depth, device=device, say=say)


def settled(execution: Execution, runner: Executor) -> Execution:
    """With the number of workers that there are: a cluster says itself how many it has room for."""
    return replace(execution, workers=runner.num_workers) if isinstance(runner, Crew) else execution

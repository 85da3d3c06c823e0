"""Every algorithm of the table, small, with what it needs to run."""

from dataclasses import replace
from typing import Any

import pytest

from fedecho import ALGORITHMS, DigitsTask, Experiment, IidPartitioner, load

CLIENTS = ["task.num_clients=8", "concurrency=3"]


def small(name: str, **changes: Any) -> Experiment:
    """Digits over eight clients, a few steps a job."""
    experiment = load("digits", algorithm=name, versions=8, settings=["local.num_local_steps=2", *CLIENTS])
    if name != "fedavg":
        changes = {"concurrency": 5, **changes}
    task = DigitsTask(num_clients=8, num_unlabeled=40, width=2, partition=IidPartitioner())
    return replace(experiment, task=task, **changes)


@pytest.fixture(params=list(ALGORITHMS))
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return small(request.param)

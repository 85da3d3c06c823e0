"""Small instances of every algorithm of the table."""

from dataclasses import replace
from typing import Any

import pytest

from fedecho import ALGORITHMS, DigitsTask, Experiment, IidPartitioner, load

CLIENTS = ["task.num_clients=8", "concurrency=3"]


def small(name: str, *settings: str, **changes: Any) -> Experiment:
    """Digits over eight clients, a few steps a job."""
    experiment = load("digits", algorithm=name, versions=8, settings=["local.num_local_steps=2", *CLIENTS, *settings])
    if name != "fedavg":
        changes = {"concurrency": 5, **changes}
    task = DigitsTask(num_clients=8, num_unlabeled=40, width=2, partition=IidPartitioner())
    return replace(experiment, task=task, **changes)


@pytest.fixture(params=list(ALGORITHMS))
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return small(request.param)


VARIANTS: dict[str, list[str]] = {
    **{name: [] for name in ALGORITHMS},
    **{f"fedbuff {rule}": [f"algorithm.combine={rule}"] for rule in ("clipped", "median", "trimmed", "krum")},
    "fadas krum": ["algorithm.combine=krum"],
    "fedbuff weighted": ["algorithm.weighted=true"],
    "ca2fl device": ["algorithm.memory=device"],
    "fedac once": ["algorithm.correction=once"],
    "fedecho half": ["algorithm.distiller.half_bank=true"],
    "fedecho probabilities": ["algorithm.distiller.average=probabilities"],
    "fedecho median": ["algorithm.distiller.teacher=median"],
    "fedecho fresh": ["algorithm.distiller.moments=fresh"],
    "fedecho none": ["algorithm.distiller.num_distill_steps=0"],
    "fedbuff noised": ["privacy.noise_multiplier=0.5", "privacy.where=server"],
    "fedasync noised": ["privacy.noise_multiplier=0.5", "privacy.where=server"],
}
"""All ways in which a method keeps what it was sent."""


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> Experiment:
    return small(request.param.partition(" ")[0], *VARIANTS[request.param])

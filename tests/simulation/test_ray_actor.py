"""The Ray actor without a cluster: updates bit-identical to a trainer, reported failures, the environment of the driver."""

import os
import pickle
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_tasks import LOCAL, MOODY, MoodyDigits

from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.executors.ray_actor import Actor, ActorInfo, Environment, JobRequest, JobResult, arrays_of, software
from fedecho.executors.worker import Failed
from fedecho.runs.build import MakeTrainer

MAKE = MakeTrainer(MoodyDigits(), LOCAL, seed=0)
HERE = Environment.current()


def base(version: int) -> GlobalModel:
    network = MAKE().network
    noise = 0.01 * torch.randn(network.layout.num_params, generator=torch.Generator().manual_seed(version))
    return GlobalModel(version, Weights(network.weights.params + noise, network.weights.buffers.clone()), noise.flip(0))


def from_the_store(model: GlobalModel) -> Any:
    """Read-only, as the object store returns them."""
    arrays = arrays_of(model.weights.params, model.weights.buffers, model.correction)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def test_an_actor_matches_a_trainer_bit_for_bit_in_any_order() -> None:
    actor, trainer, models = Actor(pickle.dumps(MAKE), HERE), MAKE(), [base(0), base(1)]
    control = np.full(models[0].weights.params.shape, 0.03, np.float32)
    requests = [
        JobRequest(number, client, version, 70 + number) for number, (client, version) in enumerate([(0, 0), (1, 1), (0, 1)])
    ]
    for request in requests:
        actor.start(request, from_the_store(models[request.version]), control)
    for request in (requests[2], requests[0], requests[1]):
        result = actor.finish(request)
        expected = trainer.train(
            Dispatch(request.number, request.client, models[request.version], request.seed), torch.from_numpy(control)
        )
        assert isinstance(result, JobResult)
        assert (result.num_examples, result.num_steps) == (expected.num_examples, expected.num_steps)
        assert result.metrics == expected.metrics
        for got, want in zip(result.arrays, (expected.delta, expected.buffers, expected.correction), strict=True):
            assert got is not None
            assert got.tobytes() == want.numpy().tobytes()
    assert not actor._runner._models, "a model that no job needs any more is released"


def test_a_failed_client_is_reported_and_the_next_is_trained() -> None:
    actor, arrays = Actor(pickle.dumps(MAKE), HERE), from_the_store(base(0))
    failed = actor.run(JobRequest(0, MOODY, 0, 5), arrays, None)
    assert isinstance(failed, Failed)
    assert (failed.number, failed.client) == (0, MOODY)
    assert failed.error.startswith("not today\nTraceback")
    assert isinstance(actor.run(JobRequest(1, 2, 0, 6), arrays, None), JobResult)


def broken() -> Any:
    raise FileNotFoundError("no data here")


def wrong() -> Any:
    return 1 / 0


def test_an_actor_that_cannot_start_reports_why() -> None:
    assert Actor(pickle.dumps(broken), HERE).info() == "no data here"
    assert str(Actor(pickle.dumps(wrong), HERE).info()).startswith("division by zero\nTraceback")
    assert Actor(pickle.dumps(MAKE), HERE).info() == ActorInfo(platform.node(), os.getpid(), software())


def test_paths_and_variables_mean_the_same_to_an_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDECHO_DATA", "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "gone")])
    there = Environment.current()
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.delenv("FEDECHO_DATA")
    monkeypatch.setattr(sys, "path", sys.path[:-2])
    there.apply()
    assert (Path.cwd(), os.environ["FEDECHO_DATA"], sys.path[-1]) == (tmp_path, "elsewhere", str(tmp_path))
    Environment(str(tmp_path / "not here"), (), {}).apply()
    assert Path.cwd() == tmp_path

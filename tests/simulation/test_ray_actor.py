"""The Ray actor without a cluster: updates bit-identical to a trainer, reported failures, the environment of the driver."""

import os
import pickle
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pool_tasks import LOCAL, MOODY, MoodyDigits
from test_pool import assert_same, job, make_trainer

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


@dataclass(eq=False)
class Ref:
    value: Any


@dataclass
class ActorCall:
    """A method of an actor: ``remote`` runs it at once in this process."""

    call: Any

    def remote(self, *arguments: Any) -> Ref:
        values = [argument.value if isinstance(argument, Ref) else argument for argument in arguments]
        return Ref(self.call(*values))


@dataclass
class RayInProcess:
    """The calls of Ray that the executor makes, without processes. The ``lost``-th job, counted from 0, kills its actor."""

    error: type[Exception]
    lost: int = -1
    num_runs: int = 0
    killed: list[Any] = field(default_factory=list)

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda **resources: SimpleNamespace(remote=lambda *given: self._handle(kind(*given))))

    def _handle(self, actor: Any) -> Any:
        def run(*given: Any) -> Any:
            self.num_runs += 1
            return self.error("killed by the kernel") if self.num_runs == self.lost + 1 else actor.run(*given)

        methods = {name: ActorCall(getattr(actor, name)) for name in ("info", "start", "finish")}
        return SimpleNamespace(**methods, run=ActorCall(run))

    def put(self, value: Any) -> Ref:
        return Ref(value)

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        return refs, []

    def get(self, ref: Ref) -> Any:
        if isinstance(ref.value, self.error):
            raise ref.value
        return ref.value

    def kill(self, handle: Any) -> None:
        self.killed.append(handle)


@dataclass
class Cluster:
    num_workers: int
    resource: str

    def check_head(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("resource", "lost"), [("CPU", -1), ("CPU", 2), ("GPU", -1)], ids=["cores", "a lost actor", "GPUs"])
def test_the_executor_matches_a_trainer_bit_for_bit(resource: str, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Ray's calls made in this process; test_ray.py has a cluster."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'fedecho[ray]'")
    from fedecho.executors import ray_executor

    in_process, said, trainer = RayInProcess(ray.exceptions.RayError, lost), list[str](), make_trainer()()
    monkeypatch.setattr(ray_executor, "ray", in_process)
    runner = ray_executor.RayExecutor(cluster=Cluster(2, resource), make_trainer=make_trainer(), say=said.append)  # type: ignore[arg-type]
    control = torch.full_like(base(0).weights.params, 0.03)
    jobs = [job(number, number % 3, version=number % 2, control=control) for number in range(6)]
    for each in jobs:
        runner.submit(each, float(each.dispatch.number))
    for each in reversed(jobs):
        assert_same(runner.result(each.dispatch.number), trainer.train(each.dispatch, each.control))
    assert len(in_process.killed) == len(said) == (lost >= 0)
    assert all("running its" in line and "killed by the kernel" in line for line in said)
    runner.close()
    assert len(in_process.killed) == 2 + (lost >= 0)

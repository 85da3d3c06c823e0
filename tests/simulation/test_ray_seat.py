"""What an actor does, without a cluster: the bytes of a trainer, failures told, surroundings taken over."""

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
from fedecho.executors.ray_actor import Errand, Hello, Parcel, Seat, Surroundings, arrays_of, software
from fedecho.executors.worker import Failed
from fedecho.runs.build import MakeTrainer

MAKE = MakeTrainer(MoodyDigits(), LOCAL, seed=0)
HERE = Surroundings.here()


def base(version: int) -> GlobalModel:
    network = MAKE().network
    noise = 0.01 * torch.randn(network.layout.num_params, generator=torch.Generator().manual_seed(version))
    return GlobalModel(version, Weights(network.weights.params + noise, network.weights.buffers.clone()), noise.flip(0))


def from_the_store(model: GlobalModel) -> Any:
    """As the object store gives them: nobody can write to them."""
    arrays = arrays_of(model.weights.params, model.weights.buffers, model.correction)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def test_a_seat_gives_the_bytes_of_a_trainer_whatever_the_order() -> None:
    seat, trainer, models = Seat(pickle.dumps(MAKE), HERE), MAKE(), [base(0), base(1)]
    control = np.full(models[0].weights.params.shape, 0.03, np.float32)
    errands = [
        Errand(number, client, version, 70 + number) for number, (client, version) in enumerate([(0, 0), (1, 1), (0, 1)])
    ]
    for errand in errands:
        seat.take(errand, from_the_store(models[errand.version]), control)
    for errand in (errands[2], errands[0], errands[1]):
        parcel = seat.give(errand)
        expected = trainer.train(
            Dispatch(errand.number, errand.client, models[errand.version], errand.seed), torch.from_numpy(control)
        )
        assert isinstance(parcel, Parcel)
        assert (parcel.num_examples, parcel.num_steps) == (expected.num_examples, expected.num_steps)
        assert parcel.metrics == expected.metrics
        for got, want in zip(parcel.arrays, (expected.delta, expected.buffers, expected.correction), strict=True):
            assert got is not None
            assert got.tobytes() == want.numpy().tobytes()
    assert not seat._bench._models, "what nobody trains from any more is let go"


def test_a_client_that_fails_is_told_and_the_next_is_trained() -> None:
    seat, arrays = Seat(pickle.dumps(MAKE), HERE), from_the_store(base(0))
    failed = seat.run(Errand(0, MOODY, 0, 5), arrays, None)
    assert isinstance(failed, Failed)
    assert (failed.number, failed.client) == (0, MOODY)
    assert failed.error.startswith("not today\nTraceback")
    assert isinstance(seat.run(Errand(1, 2, 0, 6), arrays, None), Parcel)


def broken() -> Any:
    raise FileNotFoundError("no data here")


def wrong() -> Any:
    return 1 / 0


def test_who_cannot_start_says_why() -> None:
    assert Seat(pickle.dumps(broken), HERE).hello() == "no data here"
    assert str(Seat(pickle.dumps(wrong), HERE).hello()).startswith("division by zero\nTraceback")
    assert Seat(pickle.dumps(MAKE), HERE).hello() == Hello(platform.node(), os.getpid(), software())


def test_paths_and_variables_mean_the_same_to_an_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDECHO_DATA", "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "gone")])
    there = Surroundings.here()
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.delenv("FEDECHO_DATA")
    monkeypatch.setattr(sys, "path", sys.path[:-2])
    there.enter()
    assert (Path.cwd(), os.environ["FEDECHO_DATA"], sys.path[-1]) == (tmp_path, "elsewhere", str(tmp_path))
    Surroundings(str(tmp_path / "not here"), (), {}).enter()
    assert Path.cwd() == tmp_path

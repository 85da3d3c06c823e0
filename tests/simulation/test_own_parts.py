"""A user's own task and method keep their names, and their errors are reported in the user's words."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_networks import OwnImages, experiment_of
from torch import Tensor, nn

from fedecho import FedBuff, FedEcho, Weights, resume, simulate
from fedecho.algorithms.buffer import Buffer
from fedecho.core.types import Advance, Arrival, GlobalModel
from fedecho.runs.record import read_header


@dataclass(frozen=True)
class Named:
    """A mean of two, kept under names that mean something to us."""

    tensor: Tensor
    bank: Tensor
    size: int = 0
    inner: str = "none"


@dataclass(frozen=True)
class Mean:
    distiller: str = "none"
    attached: bool = True
    without_corrections: bool = False
    buffer_size: int = 2

    def init(self, model: GlobalModel) -> Named:
        return Named(torch.zeros_like(model.weights.params), torch.zeros(3))

    def receive(self, state: Named, arrival: Arrival) -> Named:
        return Named(state.tensor + arrival.update.delta, state.bank, state.size + 1)

    def ready(self, state: Named) -> bool:
        return state.size == 2

    def advance(self, state: Named, model: GlobalModel) -> Advance[Named]:
        weights = Buffer(state.tensor, model.weights.buffers, 1).mean_step(model, 0.5)
        return Advance(self.init(model), weights)


@dataclass(frozen=True)
class Lucky(OwnImages):
    """As ``OwnImages``, with fields that are called as what we look for in a task."""

    notes: str = "written on a Tuesday"
    model_files: Any = 3
    label_counts: int = 10
    on: bool = False
    provenance: float = 0.5
    num_classes: int = 10
    seed: int = field(default=4)


def test_fields_of_any_name_run_are_recorded_and_resumed(tmp_path: Path) -> None:
    experiment = experiment_of(Lucky(), Mean())

    class Stop(Exception):  # noqa: N818
        pass

    def watch(moment: Any, scores: Any) -> None:
        if moment.step is not None:
            raise Stop

    try:
        simulate(experiment, out=tmp_path / "run", checkpoint_s=0, watch=watch)
    except Stop:
        result = resume(tmp_path / "run", experiment)
    assert result.summary.bank_bytes == 0
    assert read_header(tmp_path / "run")["notes"] == {}
    assert result.summary.model_sha256 == simulate(experiment).summary.model_sha256


@dataclass(frozen=True)
class Forgetful(OwnImages):
    """Its evaluation does not switch gradients off by itself; the score says what it found."""

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        logits = self.logits(module, torch.arange(3))
        return {"accuracy": 1.0, "graphs": float(logits.requires_grad), "grad_mode": float(torch.is_grad_enabled())}


@dataclass(frozen=True)
class Adversarial(OwnImages):
    """Its evaluation needs gradients, and says so."""

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        with torch.enable_grad():
            loss = self.loss(module, self.batch(0, torch.arange(3), torch.Generator()))
            gradient = torch.autograd.grad(loss, next(module.parameters()))[0]
        return {"accuracy": 1.0, "sensitivity": float(gradient.norm())}


def test_an_evaluation_that_forgets_no_grad_keeps_no_graph() -> None:
    for line in simulate(experiment_of(Forgetful(), FedBuff(buffer_size=2))).evaluations:
        assert (line["graphs"], line["grad_mode"]) == (0.0, 0.0)


def test_an_evaluation_may_ask_for_gradients() -> None:
    task = Adversarial()
    result = simulate(experiment_of(task, FedBuff(buffer_size=2)))
    assert all(line["sensitivity"] > 0 for line in result.evaluations)
    plain = simulate(experiment_of(OwnImages(task.module), FedBuff(buffer_size=2)))
    assert result.summary.model_sha256 == plain.summary.model_sha256


@dataclass(frozen=True)
class Scored(OwnImages):
    """Its scores are of the kind that torch and NumPy give."""

    score: Any = 0.25

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"accuracy": self.score}


@pytest.mark.parametrize("score", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25), np.array([0.25])])
def test_scores_of_torch_and_numpy_are_numbers(tmp_path: Path, score: Any) -> None:
    result = simulate(experiment_of(Scored(score=score), FedBuff(buffer_size=2)), out=tmp_path / "run")
    assert result.accuracy == 0.25
    assert type(result.evaluations[-1]["accuracy"]) is float


def test_a_score_that_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match=r"evaluate: 'accuracy' must be a number, got Tensor of shape \(2,\)"):
        simulate(experiment_of(Scored(score=torch.ones(2)), FedBuff(buffer_size=2)))


@dataclass(frozen=True)
class Careless(Mean):
    """A mean of two that writes to what it is given."""

    where: str = "receive"

    def receive(self, state: Named, arrival: Arrival) -> Named:
        if self.where == "receive":
            arrival.update.delta.mul_(0.5)
        return super().receive(state, arrival)

    def advance(self, state: Named, model: GlobalModel) -> Advance[Named]:
        if self.where == "advance":
            return Advance(self.init(model), replace(model.weights, params=model.weights.params.add_(state.tensor)))
        return Advance(self.init(model), model.weights)


@pytest.mark.parametrize("options", [{}, {"executor": "pool", "workers": 1}])
@pytest.mark.parametrize("distilled", [False, True])
def test_a_method_that_writes_to_what_it_was_given_is_named(options: dict[str, Any], distilled: bool) -> None:
    for where, name in (("receive", "arrival.update.delta"), ("advance", "model.weights.params")):
        method: Any = Careless(where=where)
        experiment = experiment_of(OwnImages(), FedEcho(inner=method) if distilled else method)
        with pytest.raises(ValueError, match=f"^Careless.{where} changed {name} in place, which it may only read"):
            simulate(experiment, **options)


class Unfinished(Mean):
    def advance(self, state: Named, model: GlobalModel) -> Any:
        return Weights(model.weights.params + state.tensor, model.weights.buffers)


def test_weights_in_place_of_an_advance_are_named() -> None:
    for method in (Unfinished(), FedEcho(inner=Unfinished())):
        with pytest.raises(TypeError, match=r"^Unfinished\.advance must return Advance\(state, weights\), got Weights$"):
            simulate(experiment_of(OwnImages(), method))


def test_a_missing_method_is_named_before_anything_runs() -> None:
    with pytest.raises(TypeError, match="OwnImages has no init, receive, ready or advance"):
        experiment_of(OwnImages(), OwnImages())  # type: ignore[arg-type]

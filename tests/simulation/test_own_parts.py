"""A user's own task and method: their names are their own, and what goes wrong in them is said in their words."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from own_networks import OwnImages, experiment_of
from torch import Tensor

from fedecho import resume, simulate
from fedecho.algorithms.buffer import Buffer
from fedecho.core.types import Advance, Arrival, GlobalModel
from fedecho.experiments.record import read_header


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

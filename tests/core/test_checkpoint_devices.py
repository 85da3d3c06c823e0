"""What a checkpoint holds goes back to the device it was on. The device here is torch's `meta`, which has no numbers but a name."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedecho import FADAS, FedAC, FedBuff
from fedecho.core.types import Arrival, ClientUpdate, GlobalModel, Weights
from fedecho.learning.trainer import _shift
from fedecho.storage.checkpoint import SameTemplate, decode, encode

META = torch.device("meta")
METHODS = [
    FedBuff(buffer_size=3),
    FedBuff(buffer_size=3, combine="median"),
    FADAS(buffer_size=3),
    FADAS(buffer_size=3, combine="trimmed"),
    FedAC(buffer_size=3, num_clients=4),
]


def model_on(device: torch.device, version: int = 0, corrected: bool = False) -> GlobalModel:
    vector = torch.ones(4, device=device)
    return GlobalModel(version, Weights(vector, vector[:2]), vector if corrected else None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield from (tensor for field in fields(value) for tensor in tensors_in(getattr(value, field.name)))
    elif isinstance(value, list):
        yield from (tensor for item in value for tensor in tensors_in(item))


def restored(value: Any, template: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    return decode(encode(value, tensors), tensors, template)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_state_in_the_middle_of_a_buffer(method: Any) -> None:
    model = model_on(torch.device("cpu"))
    update = ClientUpdate(1, 0, torch.full((4,), 0.5), torch.ones(2), 10, 2, torch.ones(4))
    state = method.receive(method.init(model), Arrival(update, model, model))
    found = list(tensors_in(restored(state, method.init(model_on(META)))))
    assert len(found) == len(list(tensors_in(state)))
    assert {tensor.device for tensor in found} <= {META}


def test_a_correction_that_the_first_model_did_not_have() -> None:
    """With FedAC a resumed client subtracts its own c_i, which is on the device, from it."""
    models = {5: model_on(torch.device("cpu"), version=5, corrected=True)}
    model = restored(models, SameTemplate(model_on(META)))[5]
    assert {tensor.device for tensor in tensors_in(model)} == {META}
    shift = _shift(model.correction, torch.zeros(4, device=META))
    assert shift is not None
    assert shift.device == META


def test_a_state_without_tensors_of_its_own_stays_where_it_was_read() -> None:
    assert restored([torch.ones(2)], None)[0].device.type == "cpu"

"""Dispatches and answers survive Flower's records exactly; anything else is refused with a reason."""

from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from flower_worlds import LAYOUT, answer_to, dispatch, module, weights
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedecho.core.layout import Layout
from fedecho.core.types import Weights
from fedecho.flower.codec import Codec, to_array, to_tensor
from fedecho.flower.wire import check_addressee, introduction, partition_of, read_introduction

CODEC = Codec(LAYOUT)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("correction", [False, True])
def test_a_dispatch_comes_back_to_the_last_bit(correction: bool) -> None:
    order = dispatch(3, 5, 2, correction)
    got = CODEC.read_dispatch(CODEC.dispatch(order))
    assert (got.number, got.client, got.seed, got.model.version) == (order.number, order.client, order.seed, 2)
    assert bits(got.model.weights.params) == bits(order.model.weights.params)
    assert bits(got.model.weights.buffers) == bits(order.model.weights.buffers)
    assert (got.model.correction is None) is not correction
    if order.model.correction is not None and got.model.correction is not None:
        assert bits(got.model.correction) == bits(order.model.correction)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=6, max_size=6), st.integers(0, 2**62))
def test_any_floats_survive_the_way_to_the_server(values: list[float], seed: int) -> None:
    layout = Layout.of_tensors({"w": torch.zeros(2, 2)}, {"b.running_mean": torch.zeros(2)})
    flat = torch.tensor(values, dtype=torch.float32)
    trained = Weights(flat[:4], flat[4:])
    got = layout.flatten({name: to_tensor(array, name, array.shape) for name, array in Codec(layout).arrays(trained).items()})
    assert bits(got.params) == bits(trained.params)
    assert bits(got.buffers) == bits(trained.buffers)


@pytest.mark.parametrize("correction", [False, True])
def test_an_answer_is_the_clients_own_delta(correction: bool) -> None:
    order = dispatch(3, 5, 2)
    update, trained = answer_to(order, correction=correction)
    got = CODEC.read_answer(CODEC.answer(update, trained), order)
    assert bits(got.delta) == bits(update.delta)
    assert bits(got.buffers) == bits(update.buffers)
    assert (got.client, got.base_version, got.num_examples, got.num_steps) == (5, 2, 11, 4)
    assert got.metrics == {"train_loss": 0.5}
    if correction and got.correction is not None and update.correction is not None:
        assert bits(got.correction) == bits(update.correction)


def test_arrays_are_what_a_flower_user_expects() -> None:
    """``load_state_dict(arrays.to_torch_state_dict())`` gives the model, and a state_dict is an answer."""
    record, net = CODEC.arrays(weights(1)), module()
    net.load_state_dict(record.to_torch_state_dict())  # counters of batches may be absent: torch fills them in
    assert bits(LAYOUT.pack(net).params) == bits(weights(1).params)
    order = dispatch()
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 3})})
    got = CODEC.read_answer(content, order)
    assert bits(got.delta) == bits(weights(1).params - order.model.weights.params)
    assert got.num_steps == 1


def good() -> dict[str, Any]:
    update, trained = answer_to(dispatch())
    return dict(CODEC.answer(update, trained))


def changed(name: str, array: Array | None) -> dict[str, Any]:
    records = good()
    arrays = dict(records["arrays"])
    if array is None:
        del arrays[name]
    else:
        arrays[name] = array
    return records | {"arrays": ArrayRecord(arrays)}


def raw(data: bytes, shape: tuple[int, ...] = (3,)) -> Array:
    return Array("float32", shape, "numpy.ndarray", data)


def npy(array: Any, **options: Any) -> bytes:
    file = BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def claiming(shape: tuple[int, ...]) -> bytes:
    """A header that claims more than there is."""
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(12)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no arrays": ({key: value for key, value in good().items() if key != "arrays"}, "record 'arrays' is missing"),
    "two sets of arrays": (
        {"model": good()["arrays"], "optimizer": good()["arrays"], "metrics": good()["metrics"]},
        "record 'arrays' is missing; the message has metrics, model, optimizer",
    ),
    "no metrics": ({key: value for key, value in good().items() if key != "metrics"}, "record 'metrics' is missing"),
    "lacking": (changed("3.bias", None), "array '3.bias' is missing"),
    "shape": (changed("3.bias", Array(np.zeros(4, np.float32))), r"'3.bias' must have shape \(3,\), got \(4,\)"),
    "type": (changed("3.bias", Array(np.zeros(3, np.float64))), "must be of type float32, got float64"),
    "endian": (changed("3.bias", raw(npy(np.zeros(3, ">f4")))), "must be of type float32"),
    "label lies": (changed("3.bias", raw(npy(np.zeros(5, np.float32)))), r"got \(5,\)"),
    "pickle": (
        changed("3.bias", raw(npy(np.array([{}, 1, 2], object), allow_pickle=True))),
        "must be of type float32, got object",
    ),
    "garbage": (changed("3.bias", raw(b"\x80\x04garbage")), "is not a valid array"),
    "empty": (changed("3.bias", raw(b"")), "is not a valid array"),
    "cut": (changed("3.bias", raw(npy(np.zeros(3, np.float32))[:-1])), "must hold 12 bytes, got 11"),
    "huge": (changed("3.bias", raw(claiming((9000000000,)))), "9000000000"),
    "broken header": (changed("3.bias", raw(claiming((3,)).replace(b", }", b",  "))), "is not a valid array"),
    "other format": (changed("3.bias", Array("float32", (3,), "torch.pickle", b"x")), "serialized as 'torch.pickle'"),
    "no count": (good() | {"metrics": MetricRecord({"train_loss": 1.0})}, "'num-examples' must be a number, got None"),
    "listed counts": (good() | {"metrics": MetricRecord({"num-examples": [1.5]})}, r"must be a number, got \[1.5\]"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_what_is_no_answer_is_refused_with_its_reason(name: str) -> None:
    records, reason = BAD[name]
    with pytest.raises(ValueError, match=reason):
        CODEC.read_answer(RecordDict(records), dispatch())


@pytest.mark.parametrize(("told", "read"), [(16.0, 16), (16, 16), (0.25, 0.25)])
def test_an_answer_is_read_as_flowers_own_strategies_read_it(told: float, read: float) -> None:
    """A count that is a float, one record of each kind whatever its name, metrics that are no finite numbers."""
    _, trained = answer_to(dispatch())
    metrics = {"num-examples": told, "loss": float("nan"), "f1": 0.5, "per-class": [1.0, 2.0], "x" * 101: 1.0}
    content = RecordDict({"parameters": CODEC.arrays(trained), "results": MetricRecord(metrics)})
    got = CODEC.read_answer(content, dispatch())
    assert bits(got.buffers) == bits(trained.buffers)
    assert (got.num_examples, type(got.num_examples)) == (read, type(read))
    assert got.metrics == {"f1": 0.5}
    why = CODEC.dropped(content)
    assert why == {
        "loss": "it is nan",
        "per-class": "it is a list, not a number",
        "x" * 101: "its name is longer than 100 characters",
    }


def test_a_users_arrays_keep_their_order() -> None:
    """Clients that zip ``state_dict().keys()`` with a list of arrays know them by their place alone."""
    names = list(module().state_dict())
    counter = Array(np.array(4))
    codec = Codec(LAYOUT, {"1.num_batches_tracked": counter}, order=tuple(names))
    assert list(codec.arrays(weights())) == names


def test_a_fortran_array_is_read_right() -> None:
    values = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert to_tensor(Array(values), "x", (2, 3)).tolist() == values.tolist()
    assert to_tensor(to_array(torch.zeros(0)), "x", (0,)).shape == (0,)


def test_what_travels_unchanged_and_a_users_config() -> None:
    counter = Array(np.array(4))
    codec = Codec(LAYOUT, {"1.num_batches_tracked": counter}, {"lr": 0.1})
    content = codec.dispatch(dispatch(version=6))
    assert content["arrays"]["1.num_batches_tracked"].numpy() == 4
    assert content["config"]["lr"] == 0.1
    assert content["config"]["server-round"] == 7


def test_nodes_say_which_client_they_are() -> None:
    assert read_introduction(introduction(partition_of({"partition-id": 4, "other": "x"}))) == 4
    with pytest.raises(ValueError, match="start it with --node-config 'partition-id=0'"):
        partition_of({})


def test_a_node_trains_as_the_client_it_is() -> None:
    content = CODEC.dispatch(dispatch(client=2))
    check_addressee(content, {"partition-id": 2})
    with pytest.raises(ValueError, match="the dispatch is for client 2, but this node is client 1"):
        check_addressee(content, {"partition-id": 1})


def test_a_client_cannot_fill_the_record() -> None:
    update, trained = answer_to(dispatch())
    many = {f"m{number}": 1.0 for number in range(1000)}
    content = CODEC.answer(replace(update, metrics=many), trained)
    assert len(CODEC.read_answer(content, dispatch()).metrics) <= 64
    assert set(CODEC.dropped(content).values()) == {"there are more than 63 metrics"}

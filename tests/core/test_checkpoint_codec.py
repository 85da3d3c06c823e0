"""Encode trees of plain values, tensors and dataclasses as JSON, and decode them."""

import json
from dataclasses import dataclass
from datetime import date
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedecho.storage.checkpoint import CheckpointError, decode, encode, load_checkpoint, save_checkpoint

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn, min_dims: int = 0) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), min_size=min_dims, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return (4 * torch.randn(shape, generator=generator)).abs().to(draw(st.sampled_from(DTYPES)))


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.text(max_size=10),
    tensors(min_dims=1),
)
trees = st.recursive(
    plain,
    lambda children: st.one_of(
        st.lists(children, max_size=4), st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), children, max_size=4)
    ),
    max_leaves=12,
)


def assert_same(left: Any, right: Any) -> None:
    """Equal types, equal order of keys, equal bits."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def through_json(value: Any, template: Any = None) -> Any:
    held: dict[str, Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, held))), held, template)


@given(trees)
@settings(max_examples=50, deadline=None)
def test_a_tree_comes_back_as_it_went(tree: Any) -> None:
    assert_same(through_json(tree), tree)


@given(trees)
@settings(max_examples=30, deadline=None)
def test_a_tree_comes_back_from_a_file_as_it_went(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = tmp_path_factory.mktemp("run")
    save_checkpoint(folder, 1, tree)
    found = load_checkpoint(folder)
    assert found is not None
    assert_same(decode(*found), tree)


@given(tensors())
@settings(max_examples=30, deadline=None)
def test_a_tensor_comes_back_without_a_file(tensor: Tensor) -> None:
    assert_same(through_json({"x": tensor}), {"x": tensor})


def test_a_tensor_of_no_dimensions_can_be_saved(tmp_path: Path) -> None:
    """A learning rate or a step counter of somebody's own algorithm."""
    save_checkpoint(tmp_path, 1, {"scale": torch.tensor(2.5)})
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert_same(decode(*found), {"scale": torch.tensor(2.5)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 5e-324, 0.1, -0.0])
def test_odd_numbers_survive(value: float) -> None:
    again = through_json(value)
    assert isnan(again) if isnan(value) else (again == value and str(again) == str(value))


def test_a_tuple_comes_back_as_a_list() -> None:
    assert through_json({"pair": (1, (2.0, "x"))}) == {"pair": [1, [2.0, "x"]]}


def test_tensors_are_copied_and_views_of_one_storage_are_apart(tmp_path: Path) -> None:
    rows = torch.arange(6.0).view(2, 3)
    tree = {"rows": [rows[0], rows[1]], "across": rows.T, "graph": torch.ones(2, requires_grad=True)}
    save_checkpoint(tmp_path, 1, tree)
    rows.zero_()
    found = load_checkpoint(tmp_path)
    assert found is not None
    again = decode(*found)
    assert [row.tolist() for row in again["rows"]] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert again["across"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert not again["graph"].requires_grad


@dataclass(frozen=True)
class Leaf:
    vector: Tensor
    size: int = 0


class Shelf:
    """Says itself what is in it, and is filled in place, as a bank or a client memory is."""

    def __init__(self, items: dict[int, Tensor]) -> None:
        self.items = items

    def __repr__(self) -> str:
        return f"Shelf({self.items})"

    def to_tree(self) -> dict[str, Any]:
        return {"items": self.items}

    def from_tree(self, tree: dict[str, Any]) -> "Shelf":
        self.items = tree["items"]
        return self


@dataclass(frozen=True)
class Branch:
    leaf: Leaf
    shelf: Shelf
    maybe: Tensor | None
    note: str


def branch(fill: float) -> Branch:
    return Branch(Leaf(torch.full((2,), fill), int(fill)), Shelf({3: torch.full((1,), fill)}), torch.ones(1), f"n{fill}")


def test_types_come_from_the_template_and_values_from_the_file() -> None:
    template = Branch(Leaf(torch.zeros(2)), Shelf({}), None, "")
    again = through_json(branch(4.0), template)
    assert type(again) is Branch
    assert type(again.leaf) is Leaf
    assert again.shelf is template.shelf
    assert (again.leaf.vector.tolist(), again.leaf.size, again.note) == ([4.0, 4.0], 4, "n4.0")
    assert again.maybe.tolist() == [1.0]
    assert again.shelf.items[3].tolist() == [4.0]


def test_templates_reach_into_maps() -> None:
    again = through_json({"state": branch(2.0), "other": [1]}, {"state": branch(0.0)})
    assert type(again["state"]) is Branch
    assert again["other"] == [1]


def test_a_dataclass_without_a_template_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a state that this algorithm does not have"):
        through_json({"state": Leaf(torch.ones(1))})


@pytest.mark.parametrize(
    "value", [{1, 2}, b"bytes", np.float32(1.0), np.zeros(2), 1j, date(2025, 1, 1), object(), Leaf, print, range(3)]
)
def test_what_cannot_be_held_is_refused_by_the_name_of_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match=f"cannot hold a {type(value).__name__}:"):
        encode({"deep": [value]}, {})


@pytest.mark.parametrize(
    ("tree", "template"),
    [
        ({(1, 2): "pair"}, None),
        ({"leaves": [Leaf(torch.ones(1), 1)]}, {"leaves": [Leaf(torch.zeros(1))]}),
        ([Shelf({0: torch.ones(1)})], [Shelf({})]),
    ],
    ids=["tuple as key", "dataclass in a list", "shelf in a list"],
)
def test_what_is_not_refused_when_saved_can_be_loaded(tree: Any, template: Any) -> None:
    """A run must not find out when it is resumed that its checkpoints are of no use."""
    held: dict[str, Tensor] = {}
    try:
        text = json.dumps(encode(tree, held))
    except TypeError:
        return
    assert repr(decode(json.loads(text), held, template)) == repr(tree)


@dataclass(frozen=True)
class Lucky:
    """A user's state whose fields have the names of methods that we look for."""

    tensor: Tensor
    to_tree: Tensor
    from_tree: int = 3
    dtype: str = "none"
    shape: tuple[int, ...] = (1, 2)


def test_a_field_may_have_any_name() -> None:
    template = Lucky(torch.zeros(2), torch.zeros(1))
    again = through_json(Lucky(torch.ones(2), torch.full((1,), 4.0)), template)
    assert type(again) is Lucky
    assert (again.tensor.tolist(), again.to_tree.tolist(), again.from_tree, again.dtype) == ([1.0, 1.0], [4.0], 3, "none")

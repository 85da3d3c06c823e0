"""A set of numbers in bytes against Python's own."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.clients import NumberSet


@given(st.lists(st.integers(0, 300)), st.lists(st.integers(-5, 400)))
@settings(max_examples=50, deadline=None)
def test_it_is_a_set(added: list[int], asked: list[int]) -> None:
    ours, theirs = NumberSet(added), set(added)
    assert ours == theirs == ours
    assert len(ours) == len(theirs)
    assert list(ours) == sorted(theirs)
    assert [number in ours for number in asked] == [number in theirs for number in asked]
    assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == theirs  # noqa: S301 (our own)
    assert hash(ours) == hash(NumberSet(reversed(added)))


def test_what_is_no_number_from_0_on_is_not_in_it() -> None:
    assert "1" not in NumberSet([1])
    with pytest.raises(ValueError, match="a number in this set must be at least 0, got -1"):
        NumberSet([-1])

"""The set of idle clients against a plain set and a plain list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.clients import Idle

SIZE = 12
actions = st.lists(st.tuples(st.sampled_from(["add", "remove", "reload"]), st.integers(0, SIZE - 1)), max_size=80)


@given(st.sets(st.integers(0, SIZE - 1)), actions)
@settings(max_examples=50, deadline=None)
def test_idle_is_a_set_that_can_be_indexed(start: set[int], actions: list[tuple[str, int]]) -> None:
    idle, model = Idle(sorted(start), SIZE), set(start)
    for action, client in actions:
        if action == "add":
            idle.add(client)
            model.add(client)
        elif action == "remove":
            idle.remove(client)
            model.discard(client)
        else:
            idle = Idle(idle.ordered(), SIZE)
        assert len(idle) == len(model)
        assert {idle[place] for place in range(len(idle))} == model
        assert [client in idle for client in range(SIZE)] == [client in model for client in range(SIZE)]
        assert idle.ordered() == [idle[place] for place in range(len(idle))]


@given(st.permutations(list(range(SIZE))), actions)
@settings(max_examples=50, deadline=None)
def test_the_order_is_that_of_a_list_whose_last_fills_the_gap(start: list[int], actions: list[tuple[str, int]]) -> None:
    """The order decides who is picked, so it is part of what a seed means."""
    idle, model = Idle(start, SIZE), list(start)
    for action, client in actions:
        if action == "add" and client not in model:
            model.append(client)
        elif action == "remove" and client in model:
            place = model.index(client)
            model[place] = model[-1]
            model.pop()
        if action != "reload":
            getattr(idle, action)(client)
        assert idle.ordered() == model


def test_an_empty_set_has_nothing_to_pick() -> None:
    idle = Idle([], 3)
    assert len(idle) == 0
    assert idle.ordered() == []
    with pytest.raises(IndexError):
        idle[0]


def test_adding_twice_and_removing_the_absent_change_nothing() -> None:
    idle = Idle([2, 0], 3)
    idle.add(2)
    idle.remove(1)
    assert idle.ordered() == [2, 0]
    idle.remove(2)
    idle.remove(2)
    assert idle.ordered() == [0]


def test_what_is_handed_out_is_a_copy() -> None:
    idle = Idle(range(3), 3)
    idle.ordered().clear()
    assert len(idle) == 3

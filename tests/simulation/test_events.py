"""The event queue against a sorted list."""

import json
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.simulation.events import Event, EventQueue

gaps = st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e6))
actions = st.lists(st.one_of(gaps, st.just("pop"), st.just("reload")), max_size=80)


def reloaded(queue: EventQueue) -> EventQueue:
    return EventQueue().from_tree(json.loads(json.dumps(queue.to_tree())))


@given(actions)
@settings(max_examples=50, deadline=None)
def test_events_come_in_the_order_of_a_sorted_list(actions: list[float | str]) -> None:
    """Puts, pops and reloads in any order; ties, of which there are many, in the order they were put."""
    queue, model, now, number = EventQueue(), [], 0.0, 0
    for action in actions:
        if action == "reload":
            queue = reloaded(queue)
        elif action == "pop":
            if model:
                model.sort()
                now, was = model.pop(0)
                assert queue.pop() == Event("finish", was % 3, was)
        else:
            queue.put(now + action, Event("finish", number % 3, number))
            model.append((now + action, number))
            number += 1
        assert len(queue) == len(model)
        assert queue.now == now
        assert [(time, event.number) for time, _, event in queue.entries()] == sorted(model)


def test_ties_are_broken_by_the_running_number_and_not_by_what_is_in_them() -> None:
    queue = EventQueue()
    events = [Event("leave", 9, 0), Event("finish", 1, 5), Event("drop", 5, 1), Event("join", 0, 0)]
    for event in events:
        queue.put(4.0, event)
    assert [queue.pop() for _ in events] == events


def test_a_reload_in_the_middle_of_a_tie_keeps_the_order() -> None:
    queue = EventQueue()
    for number in range(4):
        queue.put(1.0, Event("finish", 0, number))
    queue.pop()
    queue = reloaded(queue)
    queue.put(1.0, Event("finish", 0, 4))
    assert [queue.pop().number for _ in range(4)] == [1, 2, 3, 4]


def test_saving_changes_nothing() -> None:
    queue = EventQueue()
    queue.put(1.0, Event("finish", 0, 0))
    trees = [queue.to_tree() for _ in range(3)]
    assert trees[0] == trees[1] == trees[2]
    queue.put(1.0, Event("finish", 0, 1))
    assert [queue.pop().number, queue.pop().number] == [0, 1]


def test_all_kinds_of_events_survive_a_reload() -> None:
    queue = EventQueue()
    events = [Event("finish", 3, 1), Event("drop", 2, 7), Event("leave", 1, 0), Event("join", 0, 4)]
    for time, event in enumerate(events):
        queue.put(float(time), event)
    again = reloaded(queue)
    assert [again.pop() for _ in events] == events
    assert again.now == 3.0


@pytest.mark.parametrize("time", [4.999, -1.0, nan, -inf])
def test_an_event_before_the_clock_is_refused(time: float) -> None:
    queue = EventQueue()
    queue.put(5.0, Event("finish", 0, 0))
    queue.pop()
    with pytest.raises(ValueError, match=r"lies before the current time 5.0"):
        queue.put(time, Event("finish", 0, 1))
    assert len(queue) == 0


def test_an_event_at_the_clock_is_taken() -> None:
    queue = EventQueue()
    queue.put(5.0, Event("finish", 0, 0))
    queue.pop()
    queue.put(5.0, Event("finish", 0, 1))
    assert queue.pop().number == 1
    assert queue.now == 5.0


def test_an_empty_queue_has_nothing_to_pop() -> None:
    with pytest.raises(IndexError):
        EventQueue().pop()


@given(st.lists(st.integers(0, 5).map(float), max_size=20), actions)
@settings(max_examples=50, deadline=None)
def test_many_at_once_are_many_in_turn(times: list[float], actions: list[float | str]) -> None:
    """Columns and heap against a heap alone, with puts, pops and reloads between."""
    at_once, in_turn = EventQueue(), EventQueue()
    at_once.put_all(times, "leave")
    for client, time in enumerate(times):
        in_turn.put(time, Event("leave", client, 0))
    for action in actions:
        if action == "reload":
            at_once = reloaded(at_once)
        elif action == "pop":
            if len(in_turn):
                assert at_once.pop() == in_turn.pop()
        else:
            for queue in (at_once, in_turn):
                queue.put(queue.now + float(action), Event("finish", 1, 2))
        assert (at_once.now, len(at_once), at_once.entries()) == (in_turn.now, len(in_turn), in_turn.entries())


def test_many_at_once_need_an_empty_queue_and_a_time_to_come() -> None:
    queue = EventQueue()
    with pytest.raises(ValueError, match=r"an event at -1.0 lies before the current time"):
        queue.put_all([1.0, -1.0], "leave")
    queue.put(1.0, Event("finish", 0, 0))
    with pytest.raises(ValueError, match="put_all needs an empty queue"):
        queue.put_all([1.0], "leave")

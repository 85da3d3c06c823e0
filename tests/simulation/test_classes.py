"""Runtime classes stored as bytes against plain lists."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.randomness import numpy_rng, uniform
from fedecho.simulation.runtimes import Classes, Runtimes


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 2**40), st.sampled_from([0.0, 1.0, 5.0]))
@settings(max_examples=40, deadline=None)
def test_classes_by_size_are_those_of_sorting_by_hand(sizes: list[int], seed: int, gamma: float) -> None:
    num = len(sizes)
    rank = {client: place for place, client in enumerate(sorted(range(num), key=lambda client: sizes[client]))}
    scores = [rank[client] / max(num - 1, 1) + gamma * uniform(seed, "runtime class", client) for client in range(num)]
    slowest = sorted(range(num), key=lambda client: -scores[client])
    num_long = int(0.1 * num + 1e-9)
    num_medium = min(round(0.29 * num), num - num_long)
    expected = ["short"] * num
    for place, client in enumerate(slowest[: num_long + num_medium]):
        expected[client] = "long" if place < num_long else "medium"
    runtimes = Runtimes(runtime_gamma=gamma).assign(np.array(sizes), seed)
    assert [runtimes.class_of(client) for client in range(num)] == expected
    assert runtimes.classes.counts() == {name: expected.count(name) for name in ("short", "medium", "long")}


def test_a_class_that_is_drawn_is_drawn_when_asked_and_once() -> None:
    asked: list[int] = []
    held = Classes.drawn(("a", "b"), 1_000_000, lambda client: asked.append(client) or client % 2)
    assert [held[7], held[999_998], held[7]] == ["b", "a", "b"]
    assert asked == [7, 999_998]
    assert held.counts() is None


def test_the_fadas_rule_draws_what_it_always_drew() -> None:
    runtimes = Runtimes(rule="fadas", spread=2.0).assign([1] * 50, 3)
    draws = [numpy_rng(3, "runtime class", client).dirichlet([6.0, 4.0, 2.0]) for client in range(50)]
    assert [runtimes.class_of(client) for client in range(50)] == [("short", "medium", "long")[d.argmax()] for d in draws]

"""Client selection: every idle client has the same chance, none is chosen twice, at any number of clients."""

from collections import Counter
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.algorithms import FedBuff
from fedecho.core.randomness import below, derive
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, GlobalModel, Joined, Left, Lost, Weights


def server(num_clients: int, concurrency: int, seed: int = 0) -> Server[Any]:
    model = GlobalModel(0, Weights(torch.zeros(1), torch.zeros(0)))
    algorithm = FedBuff(buffer_size=1)
    return Server(algorithm=algorithm, model=model, num_clients=num_clients, concurrency=concurrency, seed=seed)


def answer(served: Server[Any], client: int) -> ClientUpdate:
    return ClientUpdate(client, served.open[client].base_version, torch.ones(1), torch.zeros(0), 1, 1)


actions = st.lists(st.tuples(st.sampled_from(["report", "lose", "leave", "join"]), st.integers(0, 10**6)), max_size=60)


@given(st.integers(2, 40), st.data(), actions, st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_picks_are_those_of_a_plain_list_and_nobody_works_twice(
    num_clients: int, data: st.DataObject, actions: list[tuple[str, int]], seed: int
) -> None:
    """Taken, released, gone and back in any order. The list is written down from the rule: the last one fills the gap."""
    concurrency = data.draw(st.integers(1, num_clients))
    served, idle, busy, gone, picks = server(num_clients, concurrency, seed), list(range(num_clients)), [], set(), 0
    for action, which in [("", 0), *actions]:
        if action in ("report", "lose") and busy:
            client = busy.pop(which % len(busy))
            served.receive(answer(served, client) if action == "report" else Lost(client, "by chance"))
            idle.append(client)
        elif action == "leave":
            client = which % num_clients
            served.receive(Left(client))
            gone.add(client)
            if client in busy:
                busy.remove(client)
                idle.append(client)
            if client in idle:
                idle[idle.index(client)] = idle[-1]
                idle.pop()
        elif action == "join" and gone:
            client = sorted(gone)[which % len(gone)]
            gone.remove(client)
            served.receive(Joined(client))
            idle.append(client)
        for dispatch in served.refill():
            place = derive(seed, "select", picks) % len(idle)
            assert (dispatch.number, dispatch.client) == (picks, idle[place])
            busy.append(idle[place])
            idle[place] = idle[-1]
            idle.pop()
            picks += 1
        assert len(set(busy)) == len(busy) <= concurrency
        assert set(served.open) == set(busy)
        assert not set(busy) & {*idle, *gone}
        assert len(busy) == min(concurrency, num_clients - len(gone))


@pytest.mark.parametrize("num_clients", [20, 300])
def test_everybody_is_chosen_equally_often(num_clients: int) -> None:
    """Chi-squared over clients, each pick answered at once: the sum of n - 1 squares, within five of its deviations."""
    served, picked, rounds = server(num_clients, 1, seed=11), Counter[int](), 30 * num_clients
    for _ in range(rounds):
        (dispatch,) = served.refill()
        picked[dispatch.client] += 1
        served.receive(answer(served, dispatch.client))
    expected = rounds / num_clients
    chi_squared = sum((picked[client] - expected) ** 2 / expected for client in range(num_clients))
    assert abs(chi_squared - (num_clients - 1)) < 5 * sqrt(2 * (num_clients - 1))


def test_a_pick_among_a_million_is_the_draw_itself() -> None:
    served = server(1_000_000, 3)
    first, second, third = [dispatch.client for dispatch in served.refill()]
    assert first == below(1_000_000, 0, "select", 0)
    assert len({first, second, third}) == 3
    assert len(served.idle) == 999_997

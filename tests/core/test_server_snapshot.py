"""A restored server continues bit-exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_server import answer, contents, make_server

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff
from fedecho.core.server import Server
from fedecho.core.types import GlobalModel, Joined, Left, Lost, Weights
from fedecho.storage.checkpoint import decode, load_checkpoint, save_checkpoint

METHODS: dict[str, Any] = {
    "fedavg": FedAvg(buffer_size=3),
    "fedasync": FedAsync(),
    "fedbuff": FedBuff(buffer_size=3, staleness="polynomial"),
    "ca2fl": CA2FL(buffer_size=3, num_clients=5),
    "fedac": FedAC(buffer_size=3, num_clients=5),
    "fadas": FADAS(buffer_size=3, delay_adaptive=True),
}


def play(server: Server[Any], script: list[tuple[str, int, float]]) -> list[Any]:
    """Messages to whoever is at work; everything the server said."""
    said: list[Any] = []
    for kind, which, value in script:
        said.append([(d.number, d.client, d.model.version, d.seed) for d in server.refill()])
        if kind == "join" or not server.open:
            said.append(server.receive(Joined(which % 5)))
        else:
            client = sorted(server.open)[which % len(server.open)]
            messages = {"answer": answer(server, client, value), "lose": Lost(client, "gone"), "leave": Left(client)}
            said.append(server.receive(messages[kind]))
        if server.ready:
            said.append(contents(server.advance().model))
    return said


def reopened(server: Server[Any], folder: Path, algorithm: Any) -> Server[Any]:
    """A new server that becomes the old one, by way of a file."""
    save_checkpoint(folder, 1, server.snapshot())
    fresh = make_server(algorithm=algorithm)
    found = load_checkpoint(folder)
    assert found is not None
    models = dict.fromkeys(server.snapshot()["models"], GlobalModel(0, Weights(torch.zeros(3), torch.zeros(2))))
    fresh.restore(decode(*found, {"state": fresh.state, "models": models}))
    return fresh


script = st.lists(
    st.tuples(
        st.sampled_from(["answer", "answer", "answer", "lose", "leave", "join"]), st.integers(0, 4), st.floats(-2, 2, width=32)
    ),
    max_size=15,
)


@pytest.mark.parametrize("method", METHODS)
@given(before=script, after=script)
@settings(max_examples=10, deadline=None)
def test_a_restored_server_has_the_same_future(
    tmp_path_factory: pytest.TempPathFactory, method: str, before: list[Any], after: list[Any]
) -> None:
    server = make_server(algorithm=METHODS[method])
    play(server, before)
    again = reopened(server, tmp_path_factory.mktemp("run"), METHODS[method])
    assert contents(again.snapshot()) == contents(server.snapshot())
    assert play(again, after) == play(server, after)
    assert contents(again.snapshot()) == contents(server.snapshot())


def test_a_restored_server_shares_nothing_with_the_old_one(tmp_path: Path) -> None:
    server = make_server(algorithm=METHODS["fedbuff"])
    play(server, [("answer", 0, 1.0)])
    again = reopened(server, tmp_path, METHODS["fedbuff"])
    before = contents(again.snapshot())
    play(server, [("answer", 0, 1.0)] * 6)
    assert contents(again.snapshot()) == before


def test_models_that_are_still_trained_from_are_saved_once_each() -> None:
    server = make_server(algorithm=FedBuff(buffer_size=1), concurrency=3)
    server.refill()
    for _ in range(3):
        server.receive(answer(server, max(server.open, key=lambda client: server.open[client].number)))
        server.refill()
        server.advance()
    tree = server.snapshot()
    assert set(tree["models"]) == {work[1] for work in tree["open"].values()} | {server.model.version}
    assert tree["current"] == 3

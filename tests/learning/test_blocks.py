"""A network's repeated layers, compiled as one program inside replayed steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from blobs import CLASSES, FEATURES, dispatch_of, network, trainer_of
from test_replayed import ADAMW, SGD, replayed_of, same
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fedecho.gpu import replay as replayed
from fedecho.gpu.capture import Precision, compiled_update
from fedecho.gpu.compiled_blocks import repeated_blocks
from fedecho.gpu.streams import Graph, ImmediateStream
from fedecho.learning import LocalTraining

DEPTH = 3
FAST, SURE = Precision(torch.float32), Precision(torch.float32, deterministic=True)


class CountingLane(ImmediateStream):
    """The compiler does not run below what records."""

    captures = 0

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        self.captures += 1
        return super().capture(work, pool)


class Block(nn.Module):
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            Block.runs += 1
        return hidden + torch.tanh(self.linear(hidden))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.heads = nn.ModuleList([nn.Linear(50, 50), nn.Tanh()])
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.last(hidden)
        return logits


def deep() -> Deep:
    torch.manual_seed(3)
    return Deep()


def test_which_layers_are_repeated() -> None:
    module = deep()
    assert repeated_blocks(module) == list(module.layers)
    assert repeated_blocks(network()) == []
    assert repeated_blocks(nn.ModuleList([nn.Linear(2, 2)])) == []
    lists = nn.ModuleList(nn.ModuleList([nn.Linear(9, 9)]) for _ in range(2))
    assert repeated_blocks(nn.ModuleList([module, lists])) == list(module.layers), "a list of lists is never called"


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's front alone, and for the layers alone: to generate code takes a minute on a CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(replayed, "compiled_update", lambda local, precision: compiled_update(local, Precision(compiled=False)))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("local", [SGD, ADAMW])
def test_compiled_blocks_are_the_plain_ones(local: LocalTraining) -> None:
    """One program for all of them and both shapes of batch. Python runs them to see what they use, and for whoever else asks."""
    module, said, stream = deep(), list[str](), CountingLane()
    ours = replayed_of(module, local, jitter=0.2, precision=FAST, say=said.append, stream=stream)
    plain = trainer_of(module, local, jitter=0.2)
    for seed in (5, 6):
        dispatch = dispatch_of(module, seed=seed)
        Block.runs, before = 0, stream.captures
        got = ours.train(dispatch)
        assert Block.runs == DEPTH * (stream.captures - before), (
            said
        )  # once: in float32 nothing is cast, and copies are not tried
        same(got, plain.train(dispatch))
    assert said == []
    Block.runs = 0
    ours.network.module(torch.ones(1, FEATURES))
    assert Block.runs == DEPTH
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.usefixtures("traced_only")
def test_where_the_same_bytes_are_wanted_they_are_not_compiled() -> None:
    replayed_of(deep(), SGD, precision=SURE, stream=CountingLane()).train(dispatch_of(deep()))
    assert not counters["stats"]


def test_blocks_that_cannot_be_compiled_are_captured_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        def work(*inputs: Any) -> Any:
            raise RuntimeError("no code for this")

        return work

    plain_update = compiled_update(SGD, Precision(compiled=False))
    monkeypatch.setattr(replayed, "compiled_update", lambda local, precision: plain_update)
    monkeypatch.setattr(torch, "compile", broken)
    module, said, stream = deep(), list[str](), CountingLane()
    ours = replayed_of(module, SGD, precision=FAST, say=said.append, stream=stream)
    dispatch = dispatch_of(module)
    same(ours.train(dispatch), trainer_of(module, SGD).train(dispatch))
    assert said == ["the model's layers are not compiled: no code for this"]
    assert not ours.steps.eager  # type: ignore[union-attr]
    assert stream.captures > 1

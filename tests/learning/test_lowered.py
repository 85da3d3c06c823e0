"""Weights cast together beside autocast, which casts each in its layer: the same bits, and few casts."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from fedecho.core.layout import BoundNetwork, Layout
from fedecho.learning import LocalTraining, lowered
from fedecho.learning.lowered import Lowered
from fedecho.learning.replayed import ReplayedSteps
from fedecho.learning.steps import EagerSteps

ADAMW = LocalTraining(optimizer="adamw", client_lr=0.01, batch_size=4)
SGD = LocalTraining(client_lr=0.1, batch_size=4)
WORDS, WIDTH, CLASSES = 11, 8, 3


class Net(nn.Module):
    """Layers of every kind that matters: in a row, between norms, without bias, called twice, tied, never called."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.twice, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WORDS)
        self.tied.weight = self.words.weight
        self.frozen = nn.Linear(WORDS, WIDTH)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(self.words(ids)).relu()))
        x = self.frozen(self.tied(self.twice(self.twice(x)).relu()))
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


class Words:
    def __init__(self, dtype: torch.dtype | None = torch.bfloat16) -> None:
        self.dtype = dtype

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        # A cache of casts would add the gradients of a layer that is called twice in low precision.
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None, cache_enabled=False):
            logits = module(batch[0])
        return cross_entropy(logits.float(), batch[1])


def bound(module: nn.Module) -> BoundNetwork:
    copy = deepcopy(module)
    return Layout.of(copy).bind(copy)


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [(torch.randint(WORDS, (4, 5), generator=draws), torch.randint(CLASSES, (4,), generator=draws)) for _ in range(num)]


def names_of(low: Lowered) -> set[str]:
    return {place.part.name for group in low.groups for place in group.places}


def trained(module: nn.Module, local: LocalTraining, make: Callable[[Any, LocalTraining, BoundNetwork], Any]) -> Any:
    network = bound(module)
    steps = make(Words(), local, network)
    steps.begin(network.weights.params.clone(), None, 4)
    for batch in batches(4):
        steps.step(batch)
    return network.weights.params, steps


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("small", [0, 1 << 14, 1 << 30])
@pytest.mark.parametrize("local", [SGD, ADAMW, replace(ADAMW, control_variates=True)])
def test_a_job_has_the_bits_of_autocast(
    module: nn.Module, local: LocalTraining, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowered, "SMALL", small)
    ours, steps = trained(module, local, ReplayedSteps)
    plain, eager = trained(module, local, EagerSteps)
    assert len(steps.lowered.groups) == (3 if small == 0 else 1)
    if local.optimizer == "sgd":  # AdamW's replayed step divides where the eager one multiplies
        assert torch.equal(ours, plain)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    if local.control_variates:
        torch.testing.assert_close(steps.raw_mean(), eager.raw_mean(), rtol=1e-6, atol=1e-8)


def test_which_layers(module: nn.Module) -> None:
    """Called once, under autocast, trained and not tied."""
    network, batch = bound(module), batches(1)[0]
    found = Lowered.of(network, lambda: Words().loss(network.module, batch))
    alone = {"first.weight", "first.bias", "second.weight", "head.weight", "head.bias", "tied.bias", "frozen.bias"}
    assert names_of(found) == alone
    assert not Lowered.of(network, lambda: Words(None).loss(network.module, batch)).groups


def test_two_types_are_left_to_autocast(module: nn.Module) -> None:
    network, batch = bound(module), batches(1)[0]

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = network.module.first(network.module.words(batch[0]))  # type: ignore[operator]
        with torch.autocast("cpu", torch.float16):
            network.module.second(hidden)  # type: ignore[operator]

    assert not Lowered.of(network, forward).groups


def test_the_layers_hold_their_own_again_whatever_happens(module: nn.Module) -> None:
    network, batch = bound(module), batches(1)[0]
    before = dict(network.module.named_parameters())
    found = Lowered.of(network, lambda: Words().loss(network.module, batch))
    with found.in_place():
        assert network.module.get_submodule("first").weight.dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), found.in_place():
        1 / 0  # noqa: B018
    after = dict(network.module.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert not network.module._forward_pre_hooks
    assert not any(layer._forward_pre_hooks for layer in network.module.modules())


def test_gradients_that_are_not_there_are_zero(module: nn.Module) -> None:
    network, batch = bound(module), batches(1)[0]
    found = Lowered.of(network, lambda: Words().loss(network.module, batch))
    network.grads.fill_(7.0)
    with found.in_place(), torch.autocast("cpu", torch.bfloat16):
        loss = network.module.first(network.module.words(batch[0])).float().sum()  # type: ignore[operator]
    found.gradients(loss)
    grads = {part.name: part.view(network.grads) for part in network.layout.params}
    assert {name for name, grad in grads.items() if grad.any()} == {"first.weight", "first.bias", "words.weight"}


class Casts(TorchDispatchMode):
    """Counts the casts of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is not None:
            self.of[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_fewer_casts(module: nn.Module) -> None:
    network, batch = bound(module), batches(1)[0]
    plain, ours = Lowered(network), Lowered.of(network, lambda: Words().loss(network.module, batch))
    head = (CLASSES, WIDTH)
    for found, num in ((plain, 2), (ours, 0)):  # there, and its gradient back
        with Casts() as casts:
            with found.in_place():
                loss = Words().loss(network.module, batch)
            found.gradients(loss)
        assert casts.of[head] == num

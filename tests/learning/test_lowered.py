"""Weights in low precision beside autocast, which casts each in its layer: the same bits, and no casts."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from fedecho.core.layout import BoundNetwork, Layout
from fedecho.learning import LocalTraining
from fedecho.learning.replayed import ReplayedSteps
from fedecho.learning.steps import EagerSteps

ADAMW = LocalTraining(optimizer="adamw", client_lr=0.01, batch_size=4)
SGD = LocalTraining(client_lr=0.1, batch_size=4)
WORDS, WIDTH, CLASSES = 11, 8, 3
CAST_ONCE = {"first.weight", "first.bias", "second.weight", "head.weight", "head.bias", "tied.bias", "frozen.bias"}


class Net(nn.Module):
    """Layers of every kind that matters: in a row, between norms, without bias, called twice, tied, frozen, never called."""

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
    """``also`` is a term of the loss."""

    def __init__(self, dtype: torch.dtype | None = torch.bfloat16, also: Callable[[Any, Tensor], Any] | None = None) -> None:
        self.dtype, self.also = dtype, also

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        # A cache of casts would add the gradients of a layer that is called twice in low precision.
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None, cache_enabled=False):
            logits = module(batch[0])
            more = 0.0 if self.also is None else self.also(module, batch[0])
        return cross_entropy(logits.float(), batch[1]) + more


def bound(module: nn.Module) -> BoundNetwork:
    copy = deepcopy(module)
    return Layout.of(copy).bind(copy)


def batches(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [
        (torch.randint(WORDS, (4, length), generator=draws), torch.randint(CLASSES, (4,), generator=draws))
        for length in lengths
    ]


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def trained(steps: Any, *lengths: int) -> tuple[Tensor, Tensor | None]:
    """A job from the weights that torch draws first: (where it ends, the mean raw gradient)."""
    torch.manual_seed(0)
    start = Net()
    weights = Layout.of(start).pack(start)
    steps.network.load(weights)
    steps.begin(weights.params, None, len(lengths))
    for batch in batches(*lengths):
        steps.step(batch)
    return steps.network.weights.params.clone(), steps.raw_mean()


def same(ours: tuple[Tensor, Tensor | None], plain: tuple[Tensor, Tensor | None]) -> None:
    assert torch.equal(ours[0], plain[0])
    if ours[1] is not None and plain[1] is not None:
        assert torch.equal(ours[1], plain[1])


def lowered_by(module: nn.Module, task: Words, length: int = 5) -> set[str]:
    steps = ReplayedSteps(task, SGD, bound(module))  # type: ignore[arg-type]
    return set(steps._cast_once(batches(length)[0]))


@pytest.mark.parametrize("local", [SGD, ADAMW, replace(ADAMW, control_variates=True), replace(SGD, proximal=0.3)])
def test_a_job_has_the_bits_of_autocast(module: nn.Module, local: LocalTraining) -> None:
    """Of the same steps without copies; a length that comes anew is captured in the middle of the job."""
    task: Any = Words()
    ours, lengths = ReplayedSteps(task, local, bound(module)), (5, 5, 3, 5)
    with patch.object(ReplayedSteps, "_cast_once", lambda self, batch: []):
        autocast = ReplayedSteps(task, local, bound(module))
        plain = trained(autocast, *lengths)
    same(trained(ours, *lengths), plain)
    same(trained(ours, *lengths), plain)  # a second job, whose shapes are known
    assert ours.lowered is not None
    assert autocast.lowered is None
    eager = trained(EagerSteps(task, local, bound(module)), *lengths)
    torch.testing.assert_close(eager, plain, rtol=1e-6, atol=1e-6)


def test_which_parameters(module: nn.Module) -> None:
    """Those of plain layers that are called once, under autocast, trained and not tied."""
    assert lowered_by(module, Words()) == CAST_ONCE
    assert lowered_by(module, Words(torch.float16)) == CAST_ONCE
    assert lowered_by(module, Words(None)) == set()


ALSO = {
    "a norm of its weight": (lambda net, ids: net.first.weight.square().sum(), {"first.weight"}),
    "its weight as an input": (lambda net, ids: linear(net.first.weight, net.idle.weight).sum(), {"first.weight"}),
    "its type": (lambda net, ids: 0.0 * float(net.head.weight.dtype == torch.float32), {"head.weight"}),
    "all parameters": (lambda net, ids: sum(param.abs().sum() for param in net.parameters()), CAST_ONCE),
    "a second call": (lambda net, ids: net.first(net.words(ids)).float().mean(), {"first.weight", "first.bias"}),
    "by name": (
        lambda net, ids: linear(net.words(ids), weight=net.first.weight, bias=net.first.bias).float().mean(),
        {"first.weight", "first.bias"},
    ),
    "shapes": (lambda net, ids: 0.0 * net.first.weight.shape[0] * net.first.weight.ndim * net.first.bias.numel(), set()),
}


@pytest.mark.parametrize("also", list(ALSO))
def test_a_parameter_with_another_use_is_left_to_autocast(module: nn.Module, also: str) -> None:
    use, spoilt = ALSO[also]
    task: Any = Words(also=use)
    assert CAST_ONCE - lowered_by(module, task) == spoilt
    with patch.object(ReplayedSteps, "_cast_once", lambda self, batch: []):
        plain = trained(ReplayedSteps(task, SGD, bound(module)), 5, 5)
    same(trained(ReplayedSteps(task, SGD, bound(module)), 5, 5), plain)


def test_every_shape_is_asked(module: nn.Module) -> None:
    """A model that does something else with a weight where texts are short; its other shapes keep their copies."""
    task: Any = Words(also=lambda net, ids: net.first.weight.square().sum() if ids.shape[1] < 4 else 0.0)
    assert lowered_by(module, task) - lowered_by(module, task, 3) == {"first.weight"}
    with patch.object(ReplayedSteps, "_cast_once", lambda self, batch: []):
        plain = trained(ReplayedSteps(task, ADAMW, bound(module)), 5, 3, 5, 3)
    same(trained(ReplayedSteps(task, ADAMW, bound(module)), 5, 3, 5, 3), plain)


def test_two_types_are_left_to_autocast(module: nn.Module) -> None:
    class Mixed(Words):
        def loss(self, module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = module.first(module.words(batch[0]))
            with torch.autocast("cpu", torch.float16):
                loss: Tensor = module.second(hidden).float().sum()
            return loss

    assert lowered_by(module, Mixed()) == set()


def test_hooks_and_layers_of_ones_own(module: nn.Module) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    changed: Any = module
    changed.second = Scaled(WIDTH, WIDTH, bias=False)
    changed.first.register_forward_hook(lambda layer, inputs, output: output + layer.bias)
    assert lowered_by(module, Words()) == CAST_ONCE - {"second.weight", "first.bias"}


def test_the_layers_hold_their_own_again_whatever_happens(module: nn.Module) -> None:
    steps = ReplayedSteps(Words(), SGD, bound(module))  # type: ignore[arg-type]
    net: Any = steps.network.module
    before = dict(net.named_parameters())
    names = steps._cast_once(batches(5)[0])
    assert steps.lowered is not None
    with steps.lowered.in_place(names):
        assert net.first.weight.dtype == torch.bfloat16
        assert net.twice.weight.dtype == torch.float32
    with pytest.raises(ZeroDivisionError), steps.lowered.in_place(names):
        1 / 0  # noqa: B018
    after = dict(net.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_what_is_not_used_decays_and_does_no_more(module: nn.Module) -> None:
    """The idle layer has no gradient, which counts as zero."""
    local = replace(SGD, weight_decay=0.5)
    start: Any = deepcopy(module)
    steps = ReplayedSteps(Words(), local, bound(module))  # type: ignore[arg-type]
    trained(steps, 5)
    idle: Any = steps.network.module.get_submodule("idle")
    torch.testing.assert_close(idle.weight.detach(), start.idle.weight.detach() * (1 - 0.1 * 0.5))


class Casts(TorchDispatchMode):
    """Counts the casts of matrices by their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is not None:
            self.of[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_cast_on_the_way(module: nn.Module) -> None:
    """The head's weight: autocast casts it, and its gradient back."""
    for names, num in (([], 2), (["head.weight"], 0)):
        steps = ReplayedSteps(Words(), SGD, bound(module))  # type: ignore[arg-type]
        batch = batches(5)[0]
        steps._cast_once(batch)
        with Casts() as casts:
            steps._work(batch, steps._captured_way(names))
        assert casts.of[CLASSES, WIDTH] == num

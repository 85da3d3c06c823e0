"""Weights in low precision beside autocast, which casts each in its layer: the same bits, and no casts.

Steps are recorded once and replayed, as a GPU's are.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from recorded import RecordingStream
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from fedecho.core.layout import BoundNetwork, Layout
from fedecho.gpu.low_precision import linear_params
from fedecho.gpu.replay import ReplayedSteps
from fedecho.learning import LocalTraining
from fedecho.learning.trainer import EagerSteps

ADAMW = LocalTraining(optimizer="adamw", client_lr=0.01, batch_size=4)
SGD = LocalTraining(client_lr=0.1, batch_size=4)
WORDS, WIDTH, CLASSES = 16, 8, 3
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


def replayed(module: nn.Module, task: Any, local: LocalTraining = SGD) -> ReplayedSteps:
    return ReplayedSteps(task, local, bound(module), stream=RecordingStream())


def autocast(module: nn.Module, task: Any, local: LocalTraining, *lengths: int) -> tuple[Tensor, Tensor | None]:
    """The same without copies."""
    with patch.object(ReplayedSteps, "_cast_once", lambda self, batch: []):
        steps = replayed(module, task, local)
        found = trained(steps, *lengths)
    assert steps.low_copies is None
    return found


def lowered_by(module: nn.Module, task: Words, length: int = 5) -> set[str]:
    return set(replayed(module, task)._cast_once(batches(length)[0]))


@pytest.mark.parametrize("local", [SGD, ADAMW, replace(ADAMW, control_variates=True), replace(SGD, proximal=0.3)])
def test_a_job_has_the_bits_of_autocast(module: nn.Module, local: LocalTraining) -> None:
    """Of the same steps without copies; a length that comes anew is captured in the middle of the job."""
    task: Any = Words()
    ours, lengths = replayed(module, task, local), (5, 5, 3, 5)
    plain = autocast(module, task, local, *lengths)
    same(trained(ours, *lengths), plain)
    same(trained(ours, *lengths), plain)  # a second job, whose shapes are known
    assert ours.low_copies is not None
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
    same(trained(replayed(module, task), 5, 5), autocast(module, task, SGD, 5, 5))


def test_every_shape_is_asked(module: nn.Module) -> None:
    """A model that does something else with a weight where texts are short; its other shapes keep their copies."""
    task: Any = Words(also=lambda net, ids: net.first.weight.square().sum() if ids.shape[1] < 4 else 0.0)
    assert lowered_by(module, task) - lowered_by(module, task, 3) == {"first.weight"}
    same(trained(replayed(module, task, ADAMW), 5, 3, 5, 3), autocast(module, task, ADAMW, 5, 3, 5, 3))


class Sometimes(Words):
    """Autocast for some lengths alone, or to another type."""

    def __init__(self, short: torch.dtype | None) -> None:
        super().__init__()
        self.short = short

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.dtype = self.short if batch[0].shape[1] < 4 else torch.bfloat16
        return super().loss(module, batch)


class Both(Words):
    """Two types in one loss, where texts are short."""

    def loss(self, module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        second = torch.float16 if batch[0].shape[1] < 4 else torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            hidden = module.first(module.words(batch[0])).relu()
        with torch.autocast("cpu", second):
            hidden = module.second(hidden)
        return cross_entropy(module.head(hidden.float().mean(dim=1)), batch[1])


@pytest.mark.parametrize("task", [Sometimes(None), Sometimes(torch.float16), Both()])
@pytest.mark.parametrize("lengths", [(3, 5, 3, 5, 3, 5), (5, 3, 5, 3, 5, 3)])
def test_whichever_shape_comes_first(module: nn.Module, task: Words, lengths: tuple[int, ...]) -> None:
    """One that was captured when there were no copies keeps none up."""
    same(trained(replayed(module, task, ADAMW), *lengths), autocast(module, task, ADAMW, *lengths))


def test_two_types_are_left_to_autocast(module: nn.Module) -> None:
    assert lowered_by(module, Both(), 3) == set()
    assert lowered_by(module, Both(), 5) == {"first.weight", "first.bias", "second.weight"}


class Decays(torch.autograd.Function):
    """Neither forward nor backward can be seen from Python's side of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return grad, weight.float() * 0.37


class OwnLinear(torch.autograd.Function):
    """A linear layer whose gradient is of float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (grad.float() @ weight.float()).to(x.dtype), torch.einsum("blo,bli->oi", grad.float(), x.float())


class Three(nn.Module):
    """A layer that is called as ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.words = way, nn.Embedding(WORDS, WIDTH)
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def kept(self) -> None:
        """After binding, as a user's code would at any time."""
        weight: Any = self.second.weight
        self.__dict__["known"] = dict(self.second.named_parameters())
        if self.way == "a hook on the weight":
            weight.register_hook(lambda grad: grad * 0.1)
        if self.way == "an attribute of the weight":
            weight.scale = 2.0

    def forward(self, ids: Tensor) -> Tensor:
        x, second = self.first(self.words(ids)).relu(), self.second
        if self.way == "a weight that was kept":
            y = linear(x, self.known["weight"], second.bias)
        elif self.way == "a call with kept parameters":
            y = functional_call(second, self.known, (x,))
        elif self.way == "a function of its own":
            y = OwnLinear.apply(x, second.weight)
        elif self.way == "a function beside":
            y = Decays.apply(second(x), second.weight)
        elif self.way == "a class of its own":
            y = second(x) * (2.0 if isinstance(second.weight, OwnParameter) else 1.0)
        else:
            y = second(x) * getattr(second.weight, "scale", 1.0)
        logits: Tensor = self.head(y.mean(dim=1))
        return logits


class OwnParameter(nn.Parameter):
    pass


UNSEEN = [
    "a weight that was kept",
    "a call with kept parameters",
    "a function of its own",
    "a function beside",
    "a hook on the weight",
    "an attribute of the weight",
    "a class of its own",
    "nothing odd",
]


@pytest.mark.parametrize("way", UNSEEN)
def test_uses_that_python_does_not_see(way: str) -> None:
    def job(copies: bool) -> tuple[Tensor, ReplayedSteps]:
        torch.manual_seed(0)
        module = Three(way)
        if way == "a class of its own":
            module.second.weight = OwnParameter(module.second.weight.data)
        network = Layout.of(module).bind(module)
        bound_module: Any = network.module
        bound_module.kept()
        steps = ReplayedSteps(Words(), SGD, network, stream=RecordingStream())  # type: ignore[arg-type]
        steps.begin(network.weights.params.clone(), None, 3)
        with nullcontext() if copies else patch.object(ReplayedSteps, "_cast_once", lambda self, batch: []):
            for batch in batches(5, 3, 5):
                steps.step(batch)
        return network.weights.params.clone(), steps

    ours, steps = job(copies=True)
    assert torch.equal(ours, job(copies=False)[0])
    assert ("second.weight" in steps._cast_once(batches(5)[0])) is (way == "nothing odd")


def test_a_holder_of_another_kind(module: nn.Module) -> None:
    """It calls what a linear layer calls, with a weight that a linear layer holds too."""

    class Borrows(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.weight)

    changed: Any = module
    changed.second = Borrows(changed.idle.weight)
    assert lowered_by(module, Words()) == CAST_ONCE - {"second.weight"}


def test_copies_that_would_not_be_aligned_are_not_made() -> None:
    odd = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 8), nn.Linear(8, 8))
    assert [place.part.name for place in linear_params(bound(odd))] == ["0.weight"]
    even = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4))
    assert len(linear_params(bound(even))) == 6


def test_a_loss_without_autocast_inside_one_of_the_callers(module: nn.Module) -> None:
    """Steps are made outside of it, so nothing is cast."""

    class Plain(Words):
        def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return cross_entropy(module(batch[0]).float(), batch[1])

    with torch.autocast("cpu", torch.bfloat16):
        assert lowered_by(module, Plain()) == set()


def test_hooks_and_layers_of_ones_own(module: nn.Module) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    changed: Any = module
    changed.second = Scaled(WIDTH, WIDTH, bias=False)
    changed.first.register_forward_hook(lambda layer, inputs, output: output + layer.bias)
    assert lowered_by(module, Words()) == CAST_ONCE - {"second.weight", "first.bias"}


def test_the_layers_hold_their_own_again_whatever_happens(module: nn.Module) -> None:
    steps = replayed(module, Words())
    net: Any = steps.network.module
    before = dict(net.named_parameters())
    names = steps._cast_once(batches(5)[0])
    assert steps.low_copies is not None
    with steps.low_copies.swapped_in(names):
        assert net.first.weight.dtype == torch.bfloat16
        assert net.twice.weight.dtype == torch.float32
    with pytest.raises(ZeroDivisionError), steps.low_copies.swapped_in(names):
        1 / 0  # noqa: B018
    after = dict(net.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_what_is_not_used_decays_and_does_no_more(module: nn.Module) -> None:
    """The idle layer has no gradient, which counts as zero."""
    local = replace(SGD, weight_decay=0.5)
    start: Any = deepcopy(module)
    steps = replayed(module, Words(), local)
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
        steps = replayed(module, Words())
        batch = batches(5)[0]
        steps._cast_once(batch)
        with Casts() as casts:
            steps._run_step(batch, steps._capture_context(names))
        assert casts.of[CLASSES, WIDTH] == num

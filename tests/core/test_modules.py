"""A user's module is copied and never changed, and saved models load into it."""

from collections.abc import Callable
from copy import deepcopy
from math import nan

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.prune import l1_unstructured

from fedecho.core.layout import Layout
from fedecho.core.modules import FullState, copy_module, structure_of
from fedecho.core.types import Weights
from fedecho.tasks.vision.resnet import resnet18


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("counter", torch.tensor([1, 2, 3]))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.norm.eval()


def seen(module: nn.Module) -> dict[str, tuple[object, ...]]:
    """All of a module that its owner may rely on."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    told = {name: (id(t), t.data_ptr(), t.stride(), t.requires_grad, t.tolist(), t.grad is None) for name, t in tensors.items()}
    return told | {f"layer {name}": (id(layer), layer.training) for name, layer in module.named_modules()}


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_binding_leaves_the_module_as_it_was(form: torch.memory_format) -> None:
    module = Everything().to(memory_format=form)
    before = seen(module)
    network = Layout.of(module).bind(module)
    network.weights.params.fill_(3.0)
    network.weights.buffers.fill_(4.0)
    network.module.train()
    network.module.norm(network.module.conv(torch.randn(2, 3, 4, 4))).sum().backward()
    network.module.counter.add_(1)
    assert seen(module) == before
    assert network.module.conv.weight.eq(3.0).all()
    assert network.module.conv.weight.stride() == module.conv.weight.stride()
    assert network.module.second.weight is network.module.first.weight


def test_a_frozen_parameter_is_in_memory_once() -> None:
    module = Everything()
    network = Layout.of(module).bind(module)
    assert network.module.frozen.weight.data_ptr() == module.frozen.weight.data_ptr()
    assert network.module.frozen.weight is not module.frozen.weight


def test_a_network_whose_weights_are_computed_can_be_copied() -> None:
    with pytest.warns(FutureWarning):
        module = weight_norm(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    assert torch.equal(copy_module(module)(x), module(x))


def test_a_network_that_cannot_be_copied_is_named() -> None:
    class Streams(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.left = (number for number in range(3))

    with pytest.raises(
        ValueError, match=r"the network Streams cannot be copied \(TypeError: cannot pickle 'generator' object\)"
    ):
        copy_module(Streams())


def test_the_full_state_loads_strictly_into_the_users_module() -> None:
    module = Everything()
    layout = Layout.of(module)
    network = layout.bind(module)
    network.module.counter.add_(5)
    named = network.full_state.named(Weights(torch.arange(float(layout.num_params)), torch.full((layout.num_buffers,), 2.5)))
    fresh = Everything()
    fresh.load_state_dict(named, strict=True)
    assert list(named) == list(module.state_dict())
    assert all(tensor.is_contiguous() for tensor in named.values())
    assert torch.equal(fresh.frozen.weight, module.frozen.weight)
    assert fresh.counter.tolist() == [1, 2, 3], "what counts on in training is no part of the model"
    assert fresh.norm.running_mean.eq(2.5).all()
    assert torch.equal(named["second.weight"], named["first.weight"])
    assert named["second.weight"].data_ptr() != named["first.weight"].data_ptr()
    assert torch.equal(layout.pack(fresh).params, torch.arange(float(layout.num_params)))


def test_of_a_plain_module_the_full_state_is_its_state_dict() -> None:
    module = resnet18(10, width=2)
    layout = Layout.of(module)
    expected = module.state_dict()
    named = FullState.of(module, layout).named(layout.pack(module))
    assert list(named) == list(expected)
    assert all(torch.equal(named[name], expected[name]) for name in expected)


class Scaled(nn.Linear):
    def __init__(self, scale: float) -> None:
        super().__init__(2, 2)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def test_only_known_layers_tell_their_structure() -> None:
    one = resnet18(10, width=4)
    assert structure_of(one) == structure_of(resnet18(10, width=4)) is not None
    assert structure_of(one) != structure_of(resnet18(10, width=8))
    assert structure_of(one) != structure_of(deepcopy(one).eval())
    other = resnet18(10, width=4)
    other.get_submodule("bn1").eps = 1e-3
    assert structure_of(one) != structure_of(other)
    assert structure_of(Scaled(1.0)) is structure_of(nn.Sequential(Scaled(1.0))) is None


def test_a_known_layer_that_somebody_has_changed_tells_nothing() -> None:
    hooked, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda layer, inputs, output: 2 * output)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert structure_of(nn.Linear(2, 2)) is not None
    assert structure_of(hooked) is structure_of(patched) is None


class Gate:
    """Something to call that says it is nothing."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        return x


def changed(change: Callable[[nn.Linear], object]) -> nn.Module:
    layer = nn.Linear(3, 3)
    change(layer)
    return nn.Sequential(layer)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "a forward of its own": lambda layer: setattr(layer, "forward", torch.tanh),
    "one that is false": lambda layer: setattr(layer, "forward", Gate()),
    "a tensor": lambda layer: setattr(layer, "scale", torch.ones(2)),
    "a tensor that is zero": lambda layer: setattr(layer, "scale", torch.zeros(())),
    "an array": lambda layer: setattr(layer, "scale", np.ones(2)),
    "a number of its own kind": lambda layer: setattr(layer, "scale", np.float64(0)),
    "a hook": lambda layer: layer.register_forward_pre_hook(lambda layer, inputs: None),
    "a mask": lambda layer: layer.register_buffer("mask", torch.tensor([True, False, True])),
    "a passing buffer": lambda layer: layer.register_buffer("scale", torch.ones(3), persistent=False),
    "frozen weights": lambda layer: layer.weight.requires_grad_(False),
    "pruning": lambda layer: l1_unstructured(layer, "weight", amount=1),  # type: ignore[no-untyped-call]
    "a parametrization": lambda layer: orthogonal(layer),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_more_than_its_type_and_plain_settings_tells_nothing(change: str) -> None:
    assert structure_of(changed(CHANGES[change])) is None


def test_classes_of_one_name_with_other_numbers_in_them_tell_nothing() -> None:
    """A closure; or a notebook, whose cell is run twice."""

    def network(factor: float) -> nn.Module:
        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return factor * super().forward(x)

        Net.__module__, Net.__qualname__ = "__main__", "Net"
        return Net(2, 2)

    assert repr(network(1.0)) == repr(network(2.0))
    assert structure_of(network(1.0)) is structure_of(network(2.0)) is None


def test_networks_that_use_a_layer_or_a_weight_again_are_others() -> None:
    def network(*, twice: bool = False, tied: bool = False) -> nn.Module:
        first, second, act = nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh()
        if tied:
            second.weight = first.weight
        return nn.Sequential(first, act, second, *([act] if twice else []))

    known = [structure_of(network(twice=twice, tied=tied)) for twice in (False, True) for tied in (False, True)]
    assert len(set(known)) == 4
    assert known[3] == structure_of(network(twice=True, tied=True)) is not None
    again = nn.Tanh()
    apart = nn.Sequential(nn.Linear(3, 3), again, nn.Linear(3, 3), nn.Tanh())
    assert structure_of(apart) != structure_of(network(twice=True)), "one of its own in each place"


def test_settings_that_are_equal_and_not_the_same_are_told_apart() -> None:
    slopes = [structure_of(nn.LeakyReLU(slope)) for slope in (0.0, -0.0, 0.5)]
    assert len(set(slopes)) == 3
    assert structure_of(nn.Threshold(nan, 0.0)) == structure_of(nn.Threshold(nan, 0.0))


def test_a_layer_of_torch_that_somebody_has_rewritten_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    before = structure_of(nn.Sequential(nn.Tanh()))
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x)
    assert structure_of(nn.Sequential(nn.Tanh())) != before

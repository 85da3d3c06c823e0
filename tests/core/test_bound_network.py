"""A bound module shares its memory with the flat vectors."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.types import Weights
from fedecho.tasks.vision.digits import small_cnn


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(3)
    module = small_cnn(width=4)
    module.train()
    with torch.no_grad():
        module(torch.randn(20, 1, 8, 8))  # statistics that are not their start
    return module


@pytest.fixture
def images() -> Tensor:
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def bound(module: nn.Module) -> BoundNetwork:
    copy = deepcopy(module)
    return Layout.of(copy).bind(copy)


@pytest.mark.parametrize("training", [True, False])
def test_a_bound_module_gives_bit_equal_outputs(plain: nn.Module, images: Tensor, training: bool) -> None:
    """Convolutions of the two memory formats round differently, so that the plain module is made channels-last too."""
    network = bound(plain)
    plain.to(memory_format=torch.channels_last).train(training)
    network.module.train(training)
    assert torch.equal(network.module(images), plain(images))
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(network.module.named_buffers())[name], buffer), name


def test_a_bound_module_without_convolutions_is_bit_equal_as_it_is() -> None:
    torch.manual_seed(0)
    plain, rows = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(9, 5)
    network = bound(plain)
    assert torch.equal(network.module(rows), plain(rows))
    assert torch.equal(network.weights.buffers, network.layout.pack(plain).buffers)


def test_a_step_on_the_vector_is_a_step_of_the_module(plain: nn.Module) -> None:
    network = bound(plain)
    network.weights.params.add_(0.5)
    network.weights.buffers.mul_(2.0)
    for name, param in plain.named_parameters():
        assert torch.equal(network.module.get_parameter(name), param + 0.5), name
    assert torch.equal(network.module.get_buffer("1.running_var"), 2 * plain.get_buffer("1.running_var"))


def test_a_step_of_the_module_is_a_step_on_the_vector(plain: nn.Module, images: Tensor) -> None:
    network = bound(plain)
    before = network.weights.buffers.clone()
    with torch.no_grad():
        for param in network.module.parameters():
            param.fill_(0.25)
    assert network.weights.params.eq(0.25).all()
    network.module.train()
    network.module(images)
    assert not torch.equal(network.weights.buffers, before), "running statistics are views too"
    assert torch.equal(network.weights.buffers, network.layout.pack(network.module).buffers)


def test_loading_copies_and_leaves_the_source_alone(plain: nn.Module) -> None:
    network = bound(plain)
    size = (network.layout.num_params, network.layout.num_buffers)
    source = Weights(torch.randn(size[0]), torch.rand(size[1]))
    kept = source.clone()
    network.load(source)
    network.weights.params.zero_()
    network.weights.buffers.zero_()
    assert torch.equal(source.params, kept.params)
    assert torch.equal(source.buffers, kept.buffers)
    network.load(source)
    assert torch.equal(network.layout.pack(network.module).params, source.params)
    assert torch.equal(network.layout.pack(network.module).buffers, source.buffers)


def test_gradients_add_up_in_the_flat_vector(plain: nn.Module, images: Tensor) -> None:
    network, labels = bound(plain), torch.arange(6)
    for module in (plain, network.module):
        module.eval()
    first, second = images, images.flip(0)
    total = cross_entropy(plain(first), labels) + cross_entropy(plain(second), labels)
    expected = dict(zip(dict(plain.named_parameters()), torch.autograd.grad(total, list(plain.parameters())), strict=True))
    for batch in (first, second):
        cross_entropy(network.module(batch), labels).backward()
    got = network.layout.named(Weights(network.grads, network.weights.buffers))
    assert network.grads.abs().sum() > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def test_clearing_the_flat_gradient_clears_the_module(plain: nn.Module, images: Tensor) -> None:
    network = bound(plain)
    network.module(images).square().mean().backward()
    once = network.grads.clone()
    network.grads.zero_()
    assert all(param.grad is not None and not param.grad.any() for param in network.module.parameters())
    network.module.eval()
    network.module.train()
    network.load(Layout.of(plain).pack(plain))
    network.module(images).square().mean().backward()
    assert torch.equal(network.grads, once), "the second pass must not remember the first"


def test_convolution_weights_are_channels_last_views(plain: nn.Module) -> None:
    network = bound(plain)
    weight = network.module.get_parameter("3.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    (part,) = [part for part in network.layout.params if part.name == "3.weight"]
    assert weight.data_ptr() - network.weights.params.data_ptr() == 4 * part.offset


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


def test_a_tied_weight_has_one_place_and_both_gradients() -> None:
    torch.manual_seed(0)
    plain, x = Tied(), torch.randn(5, 3)
    network = bound(plain)
    assert network.layout.num_params == 9 + 3
    assert network.module.head.weight is network.module.embed.weight
    plain(x).square().sum().backward()
    network.module(x).square().sum().backward()
    assert torch.equal(network.layout.named(Weights(network.grads, torch.zeros(0)))["embed.weight"], plain.embed.weight.grad)
    network.weights.params.zero_()
    assert not network.module.head.weight.any()


def test_a_frozen_layer_is_left_out_and_left_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    kept = module[0].weight.clone()
    network = Layout.of(module).bind(module)
    network.load(Weights(torch.full((6,), 9.0), torch.zeros(0)))
    network.module(torch.ones(1, 2)).sum().backward()
    assert torch.equal(network.module[0].weight, kept)
    assert network.module[0].weight.grad is None
    assert network.module[1].weight.eq(9.0).all()


def test_whole_number_buffers_keep_counting_on_their_own(plain: nn.Module, images: Tensor) -> None:
    network = bound(plain)
    counter = network.module.get_buffer("1.num_batches_tracked")
    before = int(counter)
    network.module.train()
    network.module(images)
    assert int(network.module.get_buffer("1.num_batches_tracked")) == before + 1
    assert counter.dtype == torch.int64
    assert network.layout.num_buffers == 2 * (4 + 8)


def test_a_module_that_is_itself_a_leaf_can_be_bound() -> None:
    network = Layout.of(nn.BatchNorm1d(2)).bind(nn.BatchNorm1d(2))
    network.weights.buffers.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert network.module.running_mean.tolist() == [1.0, 2.0]
    assert network.module.running_var.tolist() == [3.0, 4.0]

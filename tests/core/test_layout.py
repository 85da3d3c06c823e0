"""Pack names and shapes into flat vectors, and unpack them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedecho.core.layout import Layout, Part
from fedecho.core.types import Weights


class Mixed(nn.Module):
    """Everything a layout must tell apart: shapes of every rank, a frozen layer, a tied weight and all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, (2, 5))
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.volume = nn.Conv3d(1, 2, 3, bias=False)
        self.register_buffer("counter", torch.tensor([1, 2, 3]))
        self.register_buffer("mask", torch.tensor([True]))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("kept", torch.tensor([7.0, 8.0]))


def test_only_trainable_parameters_and_float_statistics_have_a_place() -> None:
    layout = Layout.of(Mixed())
    assert {part.name for part in layout.params} == {
        "scale",
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "first.weight",
        "second.bias",
        "volume.weight",
    }
    assert [part.name for part in layout.buffers] == ["kept", "norm.running_mean", "norm.running_var"]
    assert layout.num_params == 1 + 3 * 4 * 2 * 5 + 4 + 4 + 4 + 9 + 3 + 2 * 27
    assert layout.num_buffers == 2 + 4 + 4


def test_matrices_and_kernels_come_before_vectors_each_in_the_modules_order() -> None:
    layout = Layout.of(Mixed())
    matrices, vectors = ["conv.weight", "first.weight", "volume.weight"], ["scale", "conv.bias"]
    names = [part.name for part in layout.params]
    assert names[:3] == matrices
    assert names[3:5] == vectors
    assert layout.num_matrix_params == 3 * 4 * 2 * 5 + 9 + 2 * 27
    assert layout.params[3].offset == layout.num_matrix_params


def test_parts_lie_end_to_end() -> None:
    layout = Layout.of(Mixed())
    for parts, size in ((layout.params, layout.num_params), (layout.buffers, layout.num_buffers)):
        end = 0
        for part in parts:
            assert part.offset == end
            end += part.size
        assert end == size


def test_a_packed_module_comes_back_under_its_names() -> None:
    module = Mixed()
    layout = Layout.of(module)
    named = layout.named(layout.pack(module))
    expected = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert list(named) == [part.name for part in (*layout.params, *layout.buffers)]
    for name, tensor in named.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.is_contiguous(), name


@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (4, 1, 3, 3), (4, 3, 1, 1), (1, 1, 1, 1), (2, 3, 2, 3, 4)])
def test_a_kernel_keeps_its_memory_format_in_the_vector(shape: tuple[int, ...]) -> None:
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    for form, order in ((torch.contiguous_format, range(len(shape))), (last, (0, *range(2, len(shape)), 1))):
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(shape).to(memory_format=form, copy=True))
        layout = Layout.of(module)
        packed = layout.pack(module)
        assert torch.equal(packed.params, module.weight.detach().permute(*order).reshape(-1))
        view = layout.params[0].view(packed.params)
        assert torch.equal(view, module.weight)
        assert view.stride() == module.weight.stride()
        assert torch.equal(layout.params[0].flattened(torch.empty(shape).copy_(module.weight.detach())), packed.params)


def test_packing_copies() -> None:
    module = nn.Linear(2, 2)
    packed = Layout.of(module).pack(module)
    before = module.weight.detach().clone()
    packed.params.zero_()
    assert torch.equal(module.weight, before)


def test_named_tensors_are_copies() -> None:
    module = nn.Linear(2, 2)
    layout = Layout.of(module)
    packed = layout.pack(module)
    layout.named(packed)["weight"].zero_()
    assert torch.equal(packed.params, layout.pack(module).params)


shapes = st.lists(st.lists(st.integers(1, 4), max_size=5).map(tuple), max_size=6)


@given(shapes, shapes, st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_flatten_and_named_are_inverse(params: list[tuple[int, ...]], buffers: list[tuple[int, ...]], seed: int) -> None:
    module = nn.Module()
    for place, shape in enumerate(params):
        module.register_parameter(f"p{place}", nn.Parameter(torch.zeros(shape)))
    for place, shape in enumerate(buffers):
        module.register_buffer(f"b{place}", torch.zeros(shape))
    layout, generator = Layout.of(module), torch.Generator().manual_seed(seed)
    weights = Weights(torch.randn(layout.num_params, generator=generator), torch.randn(layout.num_buffers, generator=generator))
    named = layout.named(weights)
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {
        **{f"p{place}": shape for place, shape in enumerate(params)},
        **{f"b{place}": shape for place, shape in enumerate(buffers)},
    }
    again = layout.flatten(named)
    assert torch.equal(again.params, weights.params)
    assert torch.equal(again.buffers, weights.buffers)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 1, 2, 1, 2)])
def test_a_part_is_a_view_with_the_tensors_own_indices(shape: tuple[int, ...]) -> None:
    """Every entry of the view is one entry of the vector, and no two share one."""
    part = Part("some", shape, offset=2)
    flat = torch.arange(2.0 + part.size + 3)
    view = part.view(flat)
    assert tuple(view.shape) == shape
    assert sorted(view.reshape(-1).tolist()) == [2.0 + place for place in range(part.size)]
    view.fill_(-1.0)
    assert flat.tolist() == [0.0, 1.0, *[-1.0] * part.size, *(2.0 + part.size + place for place in range(3))]


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_missing_tensor_is_named(name: str) -> None:
    layout = Layout.of(nn.Linear(2, 3))
    named = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    del named[name]
    with pytest.raises(ValueError, match=rf"lack '{name}'"):
        layout.flatten(named)


def test_a_missing_statistic_is_named() -> None:
    module = nn.BatchNorm1d(2)
    layout = Layout.of(module)
    named = layout.named(layout.pack(module))
    del named["running_var"]
    with pytest.raises(ValueError, match=r"lack 'running_var'"):
        layout.flatten(named)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2, 1), torch.zeros(())])
def test_a_wrong_shape_is_named_with_both_shapes(wrong: Tensor) -> None:
    layout = Layout.of(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"'weight' must have shape \(3, 2\), got") as caught:
        layout.flatten({"weight": wrong, "bias": torch.zeros(3)})
    assert str(tuple(wrong.shape)) in str(caught.value)


def test_no_names_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"lack 'weight'"):
        Layout.of(nn.Linear(2, 3)).flatten({})


def test_a_module_without_weights_has_an_empty_layout() -> None:
    layout = Layout.of(nn.ReLU())
    packed = layout.pack(nn.ReLU())
    assert (layout.num_params, layout.num_buffers) == (0, 0)
    assert (packed.params.numel(), packed.buffers.numel()) == (0, 0)


def test_batch_norm_that_counts_batches_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None))
    with pytest.raises(ValueError, match=r"^1: BatchNorm with momentum=None"):
        Layout.of(module)


def test_variances_are_known_by_their_names() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(1))
    assert Layout.of(module).variances().tolist() == [False, False, True, True, False, True]
    assert Layout.of(nn.Linear(2, 2)).variances().tolist() == []

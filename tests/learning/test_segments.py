"""Segments of the flat vectors, and the gradients on them."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedecho.core.layout import Layout, Part
from fedecho.gpu.low_precision import ALIGNED, LARGE, segments_of

SIZES = st.lists(st.sampled_from([1, 2, 3, 8, 24, LARGE - 8, LARGE, LARGE + 1, LARGE + 8]), max_size=12)


def parts_of(sizes: list[int]) -> list[Part]:
    return [Part(str(number), (size,), sum(sizes[:number])) for number, size in enumerate(sizes)]


@given(SIZES)
def test_all_parts_in_their_order_and_each_segment_begins_aligned(sizes: list[int]) -> None:
    parts = parts_of(sizes)
    found = segments_of(parts)
    assert [part for segment in found for part in segment.parts] == parts
    for segment in found:
        assert segment.span.start % ALIGNED == 0
        assert segment.span.stop - segment.span.start == sum(part.size for part in segment.parts)


@given(SIZES)
def test_a_large_part_that_is_aligned_is_alone_and_small_ones_are_together(sizes: list[int]) -> None:
    found = segments_of(parts_of(sizes))
    alone = [part for segment in found for part in segment.parts if len(segment.parts) == 1]
    for segment in found:
        for part in segment.parts:
            if part.size >= LARGE and part.offset % ALIGNED == 0 and part.size % ALIGNED == 0:
                assert part in alone
    for one, other in pairwise(found):
        assert max(one.parts[-1].size, other.parts[0].size) >= LARGE, "two small neighbours belong together"


@given(st.lists(st.sampled_from([None, torch.bfloat16, torch.float32]), min_size=2, max_size=9))
def test_gradients_of_several_parts_are_joined_in_float32(kinds: list[torch.dtype | None]) -> None:
    parts = parts_of([number + 1 for number in range(len(kinds))])
    (segment,) = segments_of(parts)
    found = [None if kind is None else torch.randn(part.size).to(kind) for kind, part in zip(kinds, parts, strict=True)]
    joined = segment.gradient(found, torch.zeros(0))
    plain = [torch.zeros(part.size) if grad is None else grad.float() for grad, part in zip(found, parts, strict=True)]
    assert joined.dtype == torch.float32
    assert torch.equal(joined, torch.cat(plain))


def test_the_gradient_of_one_part_is_where_it_lies() -> None:
    """And a kernel's is in the layout's order, here channels-last."""
    module = nn.Conv2d(64, 64, 3, bias=False).to(memory_format=torch.channels_last)
    (segment,) = segments_of(Layout.of(module).params)
    grad = torch.randn(64, 64, 3, 3).to(memory_format=torch.channels_last)
    flat = segment.gradient([grad], torch.zeros(0))
    assert flat.data_ptr() == grad.data_ptr()
    view: Tensor = segment.parts[0].view(flat)
    assert torch.equal(view, grad)

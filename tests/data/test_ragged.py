"""Padding and spans against plain lists."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedecho.core.task import Positions
from fedecho.tasks.text.batches import Packing, Ragged, RoundUp, Spans, first_fit, own_text_only

sequences = st.lists(st.lists(st.integers(1, 99), min_size=2, max_size=7), min_size=1, max_size=6)


@given(sequences, st.data(), st.booleans())
def test_batches_are_padded_to_their_longest(rows: list[list[int]], data: st.DataObject, left: bool) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    ids, mask = Ragged.of(rows).padded(torch.tensor(chosen), fill=0, left=left)
    width = max(len(rows[row]) for row in chosen)
    for got, seen, row in zip(ids.tolist(), mask.tolist(), chosen, strict=True):
        gap = [0] * (width - len(rows[row]))
        assert got == (gap + rows[row] if left else rows[row] + gap)
        assert seen == [int(token > 0) for token in got]
    assert ids.dtype == mask.dtype == torch.int64


@given(sequences, st.data())
def test_spans_name_the_places_and_the_tokens_that_follow(rows: list[list[int]], data: st.DataObject) -> None:
    first = [data.draw(st.integers(0, len(row) - 2)) for row in rows]
    spans = Spans.of(rows, first, [len(row) - 1 for row in rows], 0, "cpu")
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    batch = spans.batch(torch.tensor(chosen))
    assert batch.targets.tolist() == [token for row in chosen for token in rows[row][first[row] + 1 :]]
    assert batch.row.tolist() == [k for k, row in enumerate(chosen) for _ in rows[row][first[row] + 1 :]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_positions_lie_end_to_end(counts: list[int], data: st.DataObject) -> None:
    positions, owner = Positions(torch.tensor(counts)), [row for row, count in enumerate(counts) for _ in range(count)]
    chosen = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1, max_size=8, unique=True))
    found = positions.of(torch.tensor(chosen)).tolist()
    assert found == [at for row in chosen for at, mine in enumerate(owner) if mine == row]
    assert positions.num == len(owner)


def test_a_row_is_a_length() -> None:
    ragged = Ragged.of([[1], [2, 3]])
    assert len(ragged) == 2
    assert ragged.lengths.tolist() == [1, 2]
    with pytest.raises(IndexError):
        ragged.padded(torch.tensor([2]), 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(9, 20))
def test_first_fit_wastes_no_row_that_has_room(lengths: list[int], width: int) -> None:
    places = first_fit(lengths, width)
    cells = [(row, column + k) for (row, column), num in zip(places, lengths, strict=True) for k in range(num)]
    assert len(set(cells)) == sum(lengths)
    assert max(column for _, column in cells) < width
    num_rows = 1 + max(row for row, _ in places)
    used = [sum(row == each for row, _ in cells) for each in range(num_rows)]
    # A row was begun because its first text found no room in the row before.
    assert all(one + two > width for one, two in pairwise(used))


@given(sequences, st.data())
def test_packed_rows_hold_the_same_texts_and_targets(rows: list[list[int]], data: st.DataObject) -> None:
    first = [data.draw(st.integers(0, len(row) - 2)) for row in rows]
    spans = Spans.of(rows, first, [len(row) - 1 for row in rows], 0, "cpu")
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5)))
    plain, packed = (
        spans.batch(chosen),
        spans.packed(chosen, Packing.of(spans.tokens.lengths[chosen], RoundUp(8), RoundUp(2)), RoundUp(4)),
    )
    assert packed.ids.shape[1] == 8
    assert packed.ids.shape[0] % 2 == 0 or packed.ids.shape[0] == 1
    num = len(plain.row)
    assert packed.targets[:num].tolist() == plain.targets.tolist()
    assert (len(packed.row), packed.filler.tolist()) == (
        RoundUp(4).apply(num),
        [False] * num + [True] * (RoundUp(4).apply(num) - num),
    )
    for number, row in enumerate(chosen.tolist(), start=1):
        assert packed.ids[packed.text == number].tolist() == rows[row]
        assert packed.position[packed.text == number].tolist() == list(range(len(rows[row])))
    assert not packed.ids[packed.text == 0].any()
    assert torch.equal(packed.mask, (packed.text > 0).long())


@given(sequences, st.data())
def test_texts_share_rows_where_that_is_less_to_compute(rows: list[list[int]], data: st.DataObject) -> None:
    spans = Spans.of(rows, [0] * len(rows), [len(row) - 1 for row in rows], 0, "cpu")
    every, sizes = torch.arange(len(rows)), (RoundUp(2, spare=1), RoundUp(8), RoundUp(2), RoundUp(4))
    found = spans.in_few_shapes(every, *sizes)
    padded = spans.batch(every, sizes[0], sizes[3])
    packed = spans.packed(every, Packing.of(spans.tokens.lengths, sizes[1], sizes[2]), sizes[3])
    assert found.ids.numel() == min(padded.ids.numel(), packed.ids.numel())
    assert (found.text is None) is (padded.ids.numel() <= packed.ids.numel())


def test_a_token_sees_its_own_text_up_to_itself() -> None:
    seen = own_text_only(torch.tensor([[1, 1, 2, 0, 0]]), torch.float32)[0, 0] == 0
    assert seen.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]

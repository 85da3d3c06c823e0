"""Padding and spans against plain lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedecho.core.tokens import Positions
from fedecho.data.ragged import Ragged
from fedecho.data.spans import Spans

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

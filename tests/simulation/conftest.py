"""Small tensors: one thread is faster, and sums round the same way everywhere."""

from collections.abc import Iterator

import pytest
from hand_pool import HandPool


@pytest.fixture
def pool() -> Iterator[HandPool]:
    """One worker, played by the test."""
    one = HandPool()
    yield one
    one.close()

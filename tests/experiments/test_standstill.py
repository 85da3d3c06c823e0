"""When a run is given up: by share, not by luck of one accepted update."""

import pytest

from fedecho import load
from fedecho.core.server import Receipt
from fedecho.experiments.standstill import DivergedError, Standstill

ACCEPTED, REJECTED = Receipt("accepted", 0), Receipt("rejected", 0, reason="it is not finite")


def seen(*receipts: Receipt) -> None:
    standstill = Standstill(load("digits"))
    for receipt in receipts:
        standstill.see(receipt)


@pytest.mark.parametrize("refused", [1, 9])
def test_up_to_nine_refused_for_each_accepted_go_on(refused: int) -> None:
    seen(*[*[REJECTED] * refused, ACCEPTED] * 300)


@pytest.mark.parametrize("refused", [10, 30])
def test_more_than_nine_refused_for_each_accepted_are_an_end(refused: int) -> None:
    with pytest.raises(DivergedError, match="it is not finite"):
        seen(*[*[REJECTED] * refused, ACCEPTED] * 300)


def test_a_hundred_in_a_row_are_enough_and_what_was_good_before_gives_no_credit() -> None:
    seen(*[REJECTED] * 99)
    with pytest.raises(DivergedError):
        seen(*[ACCEPTED] * 500, *[REJECTED] * 100)

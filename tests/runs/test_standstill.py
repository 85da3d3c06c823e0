"""A stalled run is aborted: the share of failures decides, not one accepted update."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import nn

from fedecho import DigitsTask, Experiment, load, resume, simulate
from fedecho.core.admission import NOT_FINITE
from fedecho.core.loop import Moment
from fedecho.core.server import Receipt
from fedecho.runs.run import Interrupted
from fedecho.runs.run_stats import DivergedError, StallGuard

ACCEPTED, REJECTED = Receipt("accepted", 0), Receipt("rejected", 0, reason="it is too long", code="norm")
NAN = Receipt("rejected", 0, reason="delta is not finite", code=NOT_FINITE)


def seen(*receipts: Receipt) -> None:
    guard = StallGuard(load("digits"))
    for receipt in receipts:
        guard.see(receipt)


@pytest.mark.parametrize("refused", [1, 9])
def test_up_to_nine_refused_for_each_accepted_go_on(refused: int) -> None:
    seen(*[*[REJECTED] * refused, ACCEPTED] * 300)


@pytest.mark.parametrize("refused", [10, 30])
def test_more_than_nine_refused_for_each_accepted_are_an_end(refused: int) -> None:
    with pytest.raises(DivergedError, match=r"most of the last updates .* because it is too long"):
        seen(*[*[REJECTED] * refused, ACCEPTED] * 300)


def test_a_hundred_in_a_row_are_enough_and_what_was_good_before_gives_no_credit() -> None:
    seen(*[REJECTED] * 99)
    with pytest.raises(DivergedError):
        seen(*[ACCEPTED] * 500, *[REJECTED] * 100)


def test_two_not_finite_for_each_accepted_go_on_and_three_are_an_end() -> None:
    seen(*[NAN, NAN, ACCEPTED] * 300)
    with pytest.raises(DivergedError, match=r"most of the last updates .* because delta is not finite"):
        seen(*[NAN, NAN, NAN, ACCEPTED] * 100)


@dataclass(frozen=True, kw_only=True)
class Scored(DigitsTask):
    """A user's own task, whose evaluation gives what is asked for."""

    name: str = "loss"
    value: float = float("nan")

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        return {"accuracy": 0.1, self.name: self.value}


def scored(name: str, value: float = float("nan")) -> Experiment:
    task = Scored(num_clients=20, width=1, name=name, value=value)
    return replace(load("digits", algorithm="fedbuff", versions=2, settings=["local.num_local_steps=1"]), task=task)


@pytest.mark.parametrize("name", ["loss", "accuracy", "test_loss"])
def test_a_loss_or_an_accuracy_that_is_not_a_number_is_a_divergence(name: str) -> None:
    with pytest.raises(DivergedError, match=f"the evaluation of version 2 gave {name} = nan"):
        simulate(scored(name))


@pytest.mark.parametrize(("name", "value"), [("f1", float("nan")), ("loss", float("inf")), ("loss", 1.5)])
def test_other_scores_may_be_undefined(name: str, value: float) -> None:
    assert simulate(scored(name, value)).accuracy == 0.1


def test_a_resumed_run_goes_on_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def see(self: StallGuard, receipt: Receipt) -> None:
        counts.append(self.not_finite)
        self.not_finite += 1

    def stop(moment: Moment, scores: dict[str, float] | None) -> None:
        if len(counts) == 12:
            raise Interrupted("here")

    monkeypatch.setattr(StallGuard, "see", see)
    with pytest.raises(Interrupted):
        simulate(load("digits", algorithm="fedbuff", versions=4), out=tmp_path, checkpoint_s=0, watch=stop)
    before = len(counts)
    resume(tmp_path)
    again = counts[before:]
    assert again == list(range(before - 1, before - 1 + len(again)))  # the message it was stopped at is seen again

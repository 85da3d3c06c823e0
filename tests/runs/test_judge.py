"""A long evaluation reports its progress; an interrupted one is repeated and leaves no trace in the record."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedecho import Experiment, load, resume, simulate
from fedecho.core import task as breaks
from fedecho.runs import run_stats as state
from fedecho.runs.run import Interrupted
from fedecho.runs.run_stats import ProgressWatch, RunState
from fedecho.tasks.text.gsm8k import ProgressReporter
from fedecho.tasks.vision.digits import read_digits
from fedecho.tracking.tracker import Tracker


def small(versions: int = 4) -> Experiment:
    return load("digits", algorithm="fedbuff", versions=versions, settings=["eval_every=2", "local.num_local_steps=1"])


def lines(folder: Path) -> list[dict[str, Any]]:
    """The record without what is measured."""
    found = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()[1:]]
    return [{key: value for key, value in line.items() if not key.endswith(("_s", "peak_bytes"))} for line in found]


class Breaking:
    """Asks for a stop in the middle of some evaluations."""

    def __init__(self, *which: int) -> None:
        self.which, self.num, self.seen = which, 0, list[tuple[int, int]]()
        self.made_up = list[tuple[int, float]]()

    def late_evaluation(self, version: int, now: float, scores: dict[str, float]) -> None:
        self.made_up.append((version, scores["accuracy"]))

    def __call__(self, moment: Any, scores: Any) -> None: ...

    def evaluating(self, done: int, total: int) -> None:
        self.seen.append((done, total))
        self.num += done == 0
        if self.num - 1 in self.which:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("first", "version"), [(0, 2), (1, 4)])
def test_a_run_that_is_stopped_in_an_evaluation_makes_it_up(tmp_path: Path, first: int, version: int) -> None:
    """Of version 2, or of the last; and stopped once more in the very same evaluation."""
    whole = simulate(small(), out=tmp_path / "whole")
    with pytest.raises(Interrupted, match=f"stopped at version {version} of 4; resume with"):
        simulate(small(), out=tmp_path / "run", watch=Breaking(first), checkpoint_s=1000)
    assert sum(line["event"] == "evaluation" for line in lines(tmp_path / "run")) == first
    with pytest.raises(Interrupted, match=f"stopped at version {version} of 4; resume with"):
        resume(tmp_path / "run", watch=Breaking(0))
    last = Breaking()
    ended = resume(tmp_path / "run", watch=last)
    assert [made[0] for made in last.made_up] == [version], "who watches is told"
    assert ended.summary.model_sha256 == whole.summary.model_sha256
    assert ended.summary.last10_accuracy == whole.summary.last10_accuracy
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_how_far_an_evaluation_is_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, watch = list[str](), Breaking()
    simulate(small(2), out=tmp_path / "run", watch=watch)
    num_test = len(read_digits()[1].labels)
    assert watch.seen == [(0, num_test)], "it is small enough to be judged in one go"
    follow = ProgressWatch(tmp_path / "run", RunState(2), lambda state: told.append(state.text))
    follow.evaluating(0, 10)
    follow.evaluating(3, 10)
    assert told == [], "a short one is not worth a word"
    monkeypatch.setattr(state, "LONG_S", 0.0)
    follow.evaluating(3, 10)
    assert told[0].endswith("  evaluating 3/10")


def test_what_was_made_up_is_shown_and_tracked(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        simulate(small(2), out=tmp_path / "run", watch=Breaking(0))
    states, logged = list[tuple[int, float | None, str]](), dict[int, float]()

    class Sink:
        def log(self, version: int, numbers: dict[str, float]) -> None:
            logged[version] = numbers["accuracy"]

        def close(self) -> None: ...

    tracker = Tracker({"mine": Sink}, print)

    def tell(state: RunState) -> None:
        states.append((state.version, state.accuracy, state.evaluated))

    result = resume(tmp_path / "run", watch=ProgressWatch(tmp_path / "run", RunState(2), tell, also=tracker))
    tracker.close()
    assert states[-1] == (2, result.accuracy, "")
    assert logged == {2: result.accuracy}


def test_without_a_folder_the_last_evaluation_is_finished() -> None:
    assert simulate(small(2), watch=Breaking(0)).summary.num_versions == 2


def test_where_nobody_watches_nothing_happens() -> None:
    breaks.report_progress(1, 2)
    with breaks.progress_callback(lambda done, total: None):
        breaks.report_progress(1, 2)


def test_between_two_tokens_it_is_said_and_nothing_ends() -> None:
    seen = list[tuple[int, int]]()
    between = ProgressReporter(done=64, by_token=64 / 256, width=10, total=1319)
    with breaks.progress_callback(lambda done, total: seen.append((done, total))):
        ends = [between(torch.zeros(64, 10 + made), None, more=1) for made in (1, 128, 256)]
    assert seen == [(64, 1319), (96, 1319), (128, 1319)]
    assert not any(each.any() for each in ends)


def test_a_task_without_breaks_is_judged_as_ever(tmp_path: Path) -> None:
    class Short(type(small().task)):  # type: ignore[misc]
        def evaluate(self, module: torch.nn.Module) -> dict[str, float]:
            return {"accuracy": 0.5}

    one = replace(small(2), task=Short(num_clients=20))
    assert simulate(one).accuracy == 0.5

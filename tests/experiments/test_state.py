"""The figures that people watch."""

from pathlib import Path

import pytest

from fedecho import load, resume, simulate
from fedecho.core.drive import Moment
from fedecho.experiments.run import Interrupted
from fedecho.experiments.state import Following, RunState


def test_a_resumed_run_shows_what_an_unbroken_one_shows(tmp_path: Path) -> None:
    experiment = load("digits", algorithm="fedbuff", settings=["num_versions=6", "eval_every=2", "faults.dropout=0.2"])
    shown: list[RunState] = []

    def following(folder: Path) -> Following:
        return Following(folder, RunState(6), shown.append)

    simulate(experiment, out=tmp_path / "unbroken", watch=following(tmp_path / "unbroken"))
    follow = following(tmp_path / "stopped")

    def stopping(moment: Moment, scores: dict[str, float] | None) -> None:
        follow(moment, scores)
        if follow.state.version == 4:
            raise Interrupted("here")

    with pytest.raises(Interrupted):
        simulate(experiment, out=tmp_path / "stopped", checkpoint_s=0, watch=stopping)
    resume(tmp_path / "stopped", watch=following(tmp_path / "stopped"))
    unbroken, resumed = (vars(state) for state in (shown[0], shown[-1]))
    assert resumed == unbroken
    assert unbroken["lost"] > 0
    assert unbroken["accepted"] == 6 * experiment.algorithm.buffer_size

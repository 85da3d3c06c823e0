"""The live statistics of a run."""

from pathlib import Path

import pytest

from fedecho import load, resume, simulate
from fedecho.core.loop import Moment
from fedecho.runs.run import Interrupted
from fedecho.runs.run_stats import ProgressWatch, RunState


@pytest.mark.parametrize("at_once", [False, True])
def test_a_resumed_run_shows_what_an_unbroken_one_shows(tmp_path: Path, at_once: bool) -> None:
    """Also where many arrive at the same moment."""
    (tmp_path / "trace.csv").write_text("client,runtime_s\n" + "".join(f"{client},1.0\n" for client in range(20)))
    times = f"runtimes.trace={tmp_path}/trace.csv" if at_once else "faults.dropout=0.2"
    experiment = load("digits", algorithm="fedbuff", settings=["num_versions=6", "eval_every=2", times])
    shown: list[RunState] = []

    def following(folder: Path) -> ProgressWatch:
        return ProgressWatch(folder, RunState(6), shown.append)

    simulate(experiment, out=tmp_path / "unbroken", watch=following(tmp_path / "unbroken"))
    follow = following(tmp_path / "stopped")

    def stopping(moment: Moment, scores: dict[str, float] | None) -> None:
        follow(moment, scores)
        if follow.state.accepted == 10:
            raise Interrupted("here")

    with pytest.raises(Interrupted):
        simulate(experiment, out=tmp_path / "stopped", checkpoint_s=0, watch=stopping)
    resume(tmp_path / "stopped", watch=following(tmp_path / "stopped"))
    unbroken, resumed = (vars(state) for state in (shown[0], shown[-1]))
    assert resumed == unbroken
    assert (unbroken["lost"] > 0) != at_once
    assert unbroken["accepted"] == 6 * experiment.algorithm.buffer_size

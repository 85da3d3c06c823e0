"""The race's arithmetic, and that the bare loop and our runner make exactly the job's steps."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.peers.absent import stand_in_for
from benchmarks.peers.contenders import Contender, run
from benchmarks.peers.figures import standings
from benchmarks.peers.job import JOBS, Job, batch, examples, network, train_locally
from benchmarks.peers.ours import PeersTask, experiment_of
from benchmarks.peers.tally import heard, steps_in

TINY = Job(num_examples=4, batch_size=2, num_local_steps=2, num_updates=20)


def _result(name: str, run_s: float, **more: Any) -> dict[str, Any]:
    plain = {"total_s": run_s + 3, "cpu_s": run_s, "steps": 100, "used_steps": 100, "updates": 50, "note": "", "versions": {}}
    return {"name": name, "run_s": run_s, "peak_bytes": None} | plain | more


def test_a_contender_is_compared_with_the_bare_loop_of_its_own_turn() -> None:
    turns = [
        [_result("bare loop", bare), _result("eager", 2 * bare, steps=160, used_steps=80, updates=40)]
        for bare in (1.0, 5.0, 2.0)
    ]
    watched = [_result("bare loop", 9.0, peak_bytes=10**6), _result("eager", 9.0, peak_bytes=3 * 10**6)]
    floor, eager = standings({"turns": turns, "watched": watched})
    assert (floor.per_used_step, floor.beyond_ms, floor.wasted, floor.peak_mb) == (1.0, 0.0, 0.0, 1.0)
    assert eager.per_used_step == pytest.approx(2 / 0.8)
    assert eager.per_made_step == pytest.approx(2 / 1.6)
    assert eager.beyond_ms == pytest.approx(1e3 * (4.0 / 40 - 2.0 / 50))  # the turn of the median
    assert eager.fastest == pytest.approx(2 / 0.8)
    assert eager.fastest_beyond_ms == pytest.approx(1e3 * (2.0 / 40 - 1.0 / 50))
    assert (eager.wasted, eager.start_s, eager.peak_mb) == (0.5, 3.0, 3.0)


def test_one_that_failed_says_why() -> None:
    turns = [[_result("bare loop", 1.0), {"name": "peer", "error": "no such module"}]]
    assert standings({"turns": turns, "watched": []})[1].error == "no such module"


@pytest.mark.slow
@pytest.mark.parametrize("contender", [Contender(name="bare", runner="bare"), Contender(name="ours", runner="ours")])
def test_every_step_of_the_job_is_made_once(contender: Contender) -> None:
    result = run(contender, TINY, 120.0, watched=True)
    assert (result["steps"], result["used_steps"], result["updates"]) == (40, 40, 20), result
    assert 0 < result["run_s"] < result["total_s"]
    assert result["peak_bytes"] > 50e6


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended_and_said_so() -> None:
    assert "not done within" in run(Contender(name="bare", runner="bare"), TINY, 0.1)["error"]


CONTROL = """#!/bin/sh
echo "$@ $(test "$1" = -d || cat) $CUDA_MPS_PIPE_DIRECTORY" >> {told}
echo no driver >&2
exit {code}
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
def test_an_mps_server_is_begun_and_ended_and_its_refusal_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """NVIDIA's program is not here; one that takes the same words is."""
    contender, told = Contender(name="bare", runner="bare", mps=True), tmp_path / "told"
    assert run(contender, TINY, 120.0)["error"] == "there is no nvidia-cuda-mps-control here"
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(told=told, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = run(contender, TINY, 120.0)
    words = [line.split() for line in told.read_text().splitlines()]
    if code:
        assert result["error"] == "nvidia-cuda-mps-control -d failed: no driver"
        assert [line[0] for line in words] == ["-d"]
    else:
        assert result["steps"] == 40
        assert [line[:-1] for line in words] == [["-d"], ["quit", "-t", "10"]]
        assert words[0][-1] == words[1][-1]


def test_ours_trains_on_the_examples_of_the_others() -> None:
    task = PeersTask(job=TINY)
    images, labels = task.batch(3, torch.arange(2), torch.Generator())
    theirs = batch(TINY, examples(TINY, 3), 0)
    assert torch.equal(images, theirs[0])
    assert torch.equal(labels, theirs[1])
    assert experiment_of(TINY).num_versions == TINY.num_updates // TINY.buffer_size


def test_everybody_begins_with_the_same_weights_and_moves_them() -> None:
    first, second = network("lenet"), network("lenet")
    assert sum(weights.numel() for weights in first.parameters()) == 61_706
    train_locally(TINY, first, examples(TINY, 0))
    assert not torch.equal(first.fc3.weight, second.fc3.weight)
    train_locally(TINY, second, examples(TINY, 0))
    assert torch.equal(first.fc3.weight, second.fc3.weight)


@pytest.mark.parametrize("name", JOBS)
def test_local_steps_are_whole_passes(name: str) -> None:
    """pfl counts passes and not steps."""
    job = JOBS[name]
    assert job.num_local_steps % -(-job.num_examples // job.batch_size) == 0
    assert job.num_updates % job.buffer_size == 0


def test_a_runners_line_is_found_among_its_noise() -> None:
    assert heard('noise\n{"peer": "x", "updates": 3}\nmore noise') == {"peer": "x", "updates": 3}
    assert heard("noise") is None


def test_a_stand_in_imports_and_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert stand_in_for("json", "broken_package", "no_such_package") == ["broken_package", "no_such_package"]
    import broken_package
    from no_such_package.inner import Thing

    with pytest.raises(ModuleNotFoundError, match="stand-in"):
        Thing()
    with pytest.raises(ModuleNotFoundError, match="stand-in"):
        broken_package.Other()
    for name in [module for module in sys.modules if module.startswith(("broken_package", "no_such_package"))]:
        del sys.modules[name]


def test_the_rate_of_several_processes_is_their_sum_without_warm_ups(tmp_path: Path) -> None:
    for name, page in {
        "1": [110, 90.0, 100.0, 0.0, 1.0],
        "2": [60, 95.0, 105.0, 0.0, 1.0],
        "3": [4, 99.0, 0.0, 0.0, 1.0],
    }.items():
        np.array(page).tofile(tmp_path / f"{name}.tally")
    steps = steps_in(tmp_path, warm_up=10)
    assert (steps.count, steps.first) == (174, 90.0)
    assert steps.per_s(ended=110.0) == pytest.approx(100 / 10 + 50 / 5)  # the third was never warm

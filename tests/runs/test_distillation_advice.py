"""A run whose distillation does next to nothing, or too much, says so once, with what to change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedecho import DigitsTask, Experiment, IidPartitioner, load, resume, simulate
from fedecho.cli import app
from fedecho.runs.record import read_record
from fedecho.runs.run import Interrupted

SMALL = ["task.width=2", "task.num_unlabeled=60", "local.num_local_steps=2", "eval_every=50"]


def small(rate: str, versions: int = 24, *more: str, algorithm: str = "fedecho") -> Experiment:
    return load(
        "digits", algorithm=algorithm, versions=versions, settings=[*SMALL, *more, f"algorithm.distiller.distill_lr={rate}"]
    )


def advice_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_record(folder) if line["event"] == "advice"]


def shifts_of(folder: Path) -> list[float]:
    return [line["distill_shift"] for line in read_record(folder) if line["event"] == "version"]


def test_a_rate_far_too_low_is_named_with_a_first_step(tmp_path: Path) -> None:
    said: list[str] = []
    simulate(small("1e-06"), out=tmp_path / "run", say=said.append)
    percent = 100 * float(np.median(shifts_of(tmp_path / "run")[:20]))
    assert said == [
        f"distillation moves the model by {percent:.2g} % of the buffer's step (median of the first 20 versions): it does "
        "next to nothing. Raise algorithm.distiller.distill_lr from 1e-06; 1e-05 is a good first step"
    ]
    (line,) = advice_of(tmp_path / "run")
    assert (line["version"], line["text"]) == (20, said[0])


def test_a_rate_far_too_high_is_named_with_a_lower_one(tmp_path: Path) -> None:
    said: list[str] = []
    simulate(small("0.01"), out=tmp_path / "run", say=said.append)
    middle = float(np.median(shifts_of(tmp_path / "run")[:20]))
    assert middle > 0.35
    assert len(said) == 1
    assert "it may override the clients' updates. Lower algorithm.distiller.distill_lr from 0.01, for example to " in said[0]
    assert float(said[0].rsplit(" ", 1)[1]) == pytest.approx(0.01 * 0.15 / middle, rel=0.5)


@pytest.mark.parametrize("rate", ["1e-06", "0.01"])
@pytest.mark.parametrize("stop_at", [7, 21])
def test_a_resumed_run_says_the_same_and_only_once(rate: str, stop_at: int, tmp_path: Path) -> None:
    def stop(moment: Any, scores: Any) -> None:
        if moment.step is not None and moment.step.model.version == stop_at:
            raise Interrupted("stopped")

    whole, cut = list[str](), list[str]()
    simulate(small(rate), out=tmp_path / "whole", say=whole.append)
    with pytest.raises(Interrupted):
        simulate(small(rate), out=tmp_path / "cut", checkpoint_s=0.0, watch=stop, say=cut.append)
    resume(tmp_path / "cut", say=cut.append)
    assert cut == whole
    assert advice_of(tmp_path / "cut") == advice_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("experiment", "why"),
    [
        (small("0.0003"), "a rate between the two"),
        (small("0"), "a rate of 0 is a choice"),
        (small("1e-06", 19), "too short a run"),
        (small("1e-06", 24, "algorithm.distiller.num_distill_steps=0"), "no distillation"),
        (load("digits", algorithm="fedbuff", versions=24, settings=SMALL), "another method"),
    ],
)
def test_there_is_nothing_to_say_of(experiment: Experiment, why: str, tmp_path: Path) -> None:
    said: list[str] = []
    simulate(experiment, out=tmp_path / "run", say=said.append)
    assert said == [], why
    assert advice_of(tmp_path / "run") == []


def test_the_command_prints_it_on_stderr_and_its_json_stays_json(tmp_path: Path) -> None:
    words = [word for setting in [*SMALL, "algorithm.distiller.distill_lr=1e-6"] for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["run", "digits", "--versions", "20", "--json", "--out", str(tmp_path / "run"), *words])
    assert result.exit_code == 0
    assert result.stderr.count("it does next to nothing") == 1
    assert "next to nothing" not in result.stdout


def test_a_deployed_run_says_it_too(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from test_wire_equals_simulator import over_the_loop

    task = DigitsTask(num_clients=8, num_unlabeled=40, width=2, partition=IidPartitioner())
    experiment = replace(small("1e-06", 20), task=task, concurrency=5)
    over_the_loop(experiment, tmp_path / "run")
    assert len(advice_of(tmp_path / "run")) == 1

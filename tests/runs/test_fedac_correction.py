"""FedAC's ``correction`` from the setting to the clients that follow it."""

from pathlib import Path

import pytest

from fedecho import load, simulate
from fedecho.core.algorithm import demands
from fedecho.runs.config import ConfigError

SMALL = ["task.width=2", "local.epochs=1", "task.num_unlabeled=20"]
ONCE = "algorithm.correction=once"


def test_once_is_what_the_clients_do_and_gives_another_model_than_step(tmp_path: Path) -> None:
    once, step = (load("digits", algorithm="fedac", versions=6, settings=[*SMALL, *more]) for more in ([ONCE], []))
    assert once.local_training.correct_once
    assert not step.local_training.correct_once
    models = [simulate(each).summary.model_sha256 for each in (once, step)]
    assert models[0] != models[1]
    assert simulate(once, executor="pool", workers=2).summary.model_sha256 == models[0]


def test_without_control_variates_nothing_is_corrected() -> None:
    one = load("digits", algorithm="fedac", settings=[ONCE, "algorithm.control_variates=false"])
    assert not one.local_training.correct_once
    assert not demands(one.algorithm).correct_once


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["algorithm.correction=twice"], "algorithm.correction must be 'step' or 'once', got 'twice'"),
        (["local.correct_once=true"], "set algorithm.correction=once"),
        ([ONCE, "local.optimizer=adamw", "local.corrected=step"], "leave them out"),
        ([ONCE, "local.optimizer=adamw", "local.correct_unseen=false"], "leave them out"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_line(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load("digits", algorithm="fedac", settings=settings)

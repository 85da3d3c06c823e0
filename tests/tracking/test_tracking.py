"""Sinks receive every version; none can slow down or abort a run."""

import re
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedecho import load, simulate
from fedecho.cli import app
from fedecho.tracking import SINKS, Tracker, tracked

SHORT = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20"]


class Notes:
    """A sink that remembers; it can be told to fail or to hang."""

    def __init__(self, fail: bool = False, hang: threading.Event | None = None) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.fail, self.hang, self.closed = fail, hang, False

    def log(self, version: int, numbers: Any) -> None:
        if self.fail:
            raise ConnectionError("no route")
        if self.hang is not None:
            self.hang.wait()
        self.seen.append((version, dict(numbers)))

    def close(self) -> None:
        self.closed = True


def run(tracker: Tracker) -> str:
    return simulate(load("digits", versions=4, settings=SHORT), watch=tracker).summary.model_sha256


def test_a_sink_hears_of_every_version_with_scores_and_metrics() -> None:
    notes = Notes()
    tracker = Tracker({"notes": lambda: notes}, print)
    run(tracker)
    tracker.close()
    assert [version for version, _ in notes.seen] == [1, 2, 3, 4]
    assert {"teacher_entropy", "virtual_s", "accepted", "mean_staleness"} <= set(notes.seen[0][1])
    assert "accuracy" in notes.seen[1][1]
    assert notes.closed


def test_a_sink_that_fails_is_switched_off_in_one_line_and_the_others_go_on() -> None:
    said: list[str] = []
    good = Notes()
    tracker = Tracker({"bad": lambda: Notes(fail=True), "worse": lambda: 1 / 0, "good": lambda: good}, said.append)  # type: ignore[arg-type, return-value]
    run(tracker)
    tracker.close()
    assert len(good.seen) == 4
    assert sorted(said) == [
        "--track bad is disabled: ConnectionError: no route",
        "--track worse is disabled: ZeroDivisionError: division by zero",
    ]


def test_a_sink_that_hangs_does_not_hold_the_run() -> None:
    said: list[str] = []
    release = threading.Event()
    tracker = Tracker({"slow": lambda: Notes(hang=release)}, said.append, queue_size=2)
    run(tracker)
    began = time.monotonic()
    tracker.close(timeout_s=0.1)
    assert time.monotonic() - began < 60
    assert any("is abandoned" in text for text in said)
    assert any("were not logged" in text for text in said)
    release.set()


def test_tracking_changes_no_bit() -> None:
    tracker = Tracker({"notes": Notes}, print)
    with_it = run(tracker)
    tracker.close()
    assert with_it == simulate(load("digits", versions=4, settings=SHORT)).summary.model_sha256


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    import torch.utils.tensorboard  # noqa: F401 (takes seconds, and a tracker waits a while only)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracked(["tensorboard"], tmp_path, {"local": {"epochs": 2}}, print) as tracker:
        run(tracker)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("accuracy")] == [2, 4]
    assert len(board.Scalars("teacher_entropy")) == 4


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_whose_package_is_not_installed_is_an_error_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as Python marks what cannot be imported
    told = rf"--track {name} needs the package {name}, which is not installed: pip install 'fedecho\[{name}\]'"
    with pytest.raises(ValueError, match=told), tracked([name], tmp_path):
        pass
    for words in (["run", "digits", "--out"], ["compare", "digits", "--out"]):
        result = CliRunner().invoke(app, [*words, str(tmp_path / "run"), "--track", name])
        assert result.exit_code == 2
        assert re.fullmatch(told, result.stderr.strip())
    assert not (tmp_path / "run").exists()


def test_an_unknown_sink_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="did you mean 'wandb'"), tracked(["wandbb"], "."):
        pass


def test_wandb_is_called_as_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    wandb = ModuleType("wandb")

    def init(**options: Any) -> SimpleNamespace:
        calls.append(options)
        return SimpleNamespace(log=lambda numbers, step: calls.append(step), finish=lambda: calls.append("finished"))

    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with tracked(["wandb"], tmp_path / "mine", {"local": {"epochs": 2}}, print) as tracker:
        run(tracker)
    assert calls[0]["name"] == "mine"
    assert calls[0]["config"] == {"local.epochs": 2}
    assert calls[1:] == [1, 2, 3, 4, "finished"]


def test_mlflow_is_called_as_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            calls.append(name)

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
            calls.append((experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            calls.append([metric[3] for metric in metrics][:1] or params)

        def set_terminated(self, run_id: str) -> None:
            calls.append("finished")

    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient = Client  # type: ignore[attr-defined]
    entities.Metric, entities.Param = lambda *a: a, lambda *a: a  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    with tracked(["mlflow"], tmp_path / "mine", {"seed": 3}, print) as tracker:
        run(tracker)
    assert calls == ["fedecho", ("7", "mine"), [("seed", "3")], [1], [2], [3], [4], "finished"]

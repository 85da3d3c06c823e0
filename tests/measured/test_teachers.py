"""The benchmark of teachers: it does not change the run, and its counts are right."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from benchmarks.derived import filled
from benchmarks.teachers.__main__ import main
from benchmarks.teachers.page import PAGE, cells, draw, parts, read_runs, shown, twice
from benchmarks.teachers.watched import Run, watched_run
from tiny_text import pairs, write_world

from fedecho import load, simulate

SMALL = ["task.unlabeled_size=8", "task.num_clients=6", "eval_every=1", "local.num_local_steps=2", "num_versions=4"]
SMALL += ["local.client_lr=1e-2", "algorithm.buffer_size=1"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("algorithm", ["fedbuff", "fedecho"])
def test_a_watched_run_is_the_run_and_its_model_is_judged_as_the_task_judges_it(
    algorithm: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDECHO_DATA", str(world))
    settings = [each.replace("algorithm.", "algorithm.inner.") if algorithm == "fedecho" else each for each in SMALL]
    run = watched_run("tiny-bert", algorithm, settings, 0, "serial")
    plain = simulate(load("mrpc", algorithm=algorithm, settings=["task.model=tiny-bert", *settings]))
    assert run.model == pytest.approx([line["accuracy"] for line in plain.evaluations])
    assert run.model == pytest.approx(run.evaluations)
    assert run.model_sha256 == plain.summary.model_sha256, "watching changes no bit of it"
    assert run.model_files.startswith("sha256 ")
    assert run.execution["executor"] == "serial"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--algorithm", "fedbuf"], "unknown algorithm 'fedbuf'"),
        (["--set", "foo"], "foo"),
        (["--model", "nosuch"], "nosuch"),
        (["--seeds", "a"], "it must be values separated by commas"),
        (["--json", "nowhere/x.json"], "must be a file in a folder that is there"),
    ],
)
def test_a_mistake_is_a_line(
    given: list[str], said: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDECHO_DATA", str(world))
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "tiny-bert", *given])
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_first_teacher_is_the_first_client(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a buffer of one FedBuff's first model is that client's own; later teachers are means and are not."""
    monkeypatch.setenv("FEDECHO_DATA", str(world))
    run = watched_run("tiny-bert", "fedbuff", SMALL, 0, "serial")
    assert run.teacher[0] == run.clients[0] == run.model[0]
    assert run.teacher_says_1[0] == run.model_says_1[0]
    share = fmean(label == 1 for label, _, _ in pairs(20, 1))
    for right, ones in zip(run.model, run.model_says_1, strict=True):
        if ones in (0.0, 1.0):
            assert right == pytest.approx(share if ones else 1 - share)


def test_means_are_of_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    values = [0.0] * 150 + [0.5] * 50
    shown([Run("m", "fedbuff", ["a=1"], 3, values, values, values, values, values)])
    assert capsys.readouterr().out.splitlines()[1].split() == ["m,", "FedBuff,", "a", "1", "3", "50.00", "50.00", "50.00"]


def test_the_page_says_what_the_results_say() -> None:
    assert filled(PAGE.read_text(), parts(read_runs())) == PAGE.read_text()


def test_a_table_s_evaluations_are_every_fifth_version(tmp_path: Path) -> None:
    values = [float(version % 5 == 0 and version > 150) for version in range(1, 201)]
    for seed in (0, 1):
        (tmp_path / f"{seed}.json").write_text(json.dumps({"rows": [{"model": values}]}))
    assert twice("m", "{}.json", tmp_path) == ["m", "100.00, 100.00, -", "", "25.00, 25.00, -", ""]
    kept = {"evaluations": [{"accuracy": 0.5}] * 40}
    (tmp_path / "2.json").write_text(json.dumps(kept))
    assert twice("m", "{}.json", tmp_path)[1:3] == ["100.00, 100.00, 50.00", "83.33"]


def test_leads_are_of_the_end_and_counted_version_by_version() -> None:
    model, teacher = [0.9] * 150 + [0.5] * 40 + [0.8] * 10, [0.0] * 150 + [0.6] * 50
    ones = [1.0] * 50 + [0.5] * 150
    row = cells(Run("m", "fedbuff", [], 0, model, teacher, teacher, ones, ones))
    assert row[2:7] == ["56.00", "60.00", "60.00", "10.00", "80 %"]
    assert row[-2:] == ["25 %", "25 %"]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw(read_runs()[:2], tmp_path / "p.svg")
    assert "validation pairs" in (tmp_path / "p.svg").read_text()

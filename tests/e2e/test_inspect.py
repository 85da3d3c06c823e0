"""``fedecho inspect``: what a run's unlabeled data is worth, beside other candidates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import generated, write_cifar10, write_cifar100
from typer.testing import CliRunner

from fedecho import load, simulate
from fedecho.cli import app
from fedecho.runs.inspection import InspectedU
from fedecho.runs.run import Interrupted

SMALL = ["task.width=2", "task.num_unlabeled=60", "local.num_local_steps=3", "eval_every=50"]


def inspected(folder: Path, *words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["inspect", str(folder), "--json", *words])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["unlabeled"]
    return found


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    simulate(load("digits", versions=3, settings=SMALL), out=folder)
    return folder


def test_a_run_and_a_candidate_side_by_side(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    own, other = inspected(run, "--unlabeled", "task.num_unlabeled=40")
    assert (own["unlabeled"], own["rows"], own["num_clients"]) == ("the run's", 60, 20)
    assert (other["unlabeled"], other["rows"]) == ("task.num_unlabeled=40", 40)
    for each in (own, other):
        assert 0 <= each["lowest_agreement"] <= each["agreement"] <= 1
        assert 0 <= each["entropy"] <= 1
        assert 0 <= each["balance"] <= 1
        assert 0 <= each["least_coverage"] <= 20
        assert each["shift"] > 0
    assert inspected(run) == [own], "the same numbers each time, with other candidates or without"
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before, "the folder is only read"


def test_the_table_has_a_column_for_each_u_and_a_line_of_advice(run: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(run), "--clients", "4", "--unlabeled", "task.num_unlabeled=40"])
    assert result.exit_code == 0, result.output
    head = next(line for line in result.stdout.splitlines() if "the run's" in line)
    assert "task.num_unlabeled=40" in head
    (rows,) = (line for line in result.stdout.splitlines() if "rows of U" in line)
    assert rows.split()[-2:] == ["60", "40"]
    assert any(line.startswith("the run's: ") for line in result.stdout.splitlines())
    assert "training client 1 of 4" in result.stderr


def test_a_single_client_is_its_own_teacher(run: Path) -> None:
    (own,) = inspected(run, "--clients", "1")
    assert (own["num_clients"], own["agreement"], own["lowest_agreement"]) == (1, 1, 1)
    assert own["least_coverage"] in (0, 1)


def test_a_distillation_that_changes_nothing_changes_no_accuracy(tmp_path: Path) -> None:
    still = ["algorithm.distiller.distill_lr=0", "algorithm.distiller.batch_norm=frozen"]
    simulate(load("digits", versions=2, settings=[*SMALL, *still]), out=tmp_path / "run")
    (own,) = inspected(tmp_path / "run", "--clients", "6")
    assert own["shift"] == 0
    assert own["accuracy_before"] == own["accuracy_after"]


@pytest.mark.parametrize("inner", ["fadas", "fedac"])
def test_every_inner_method_can_be_inspected(inner: str, tmp_path: Path) -> None:
    settings = [*SMALL, f"algorithm.inner.name={inner}", "algorithm.inner.buffer_size=3"]
    simulate(load("digits", versions=2, settings=settings), out=tmp_path / "run")
    (own,) = inspected(tmp_path / "run", "--clients", "4")
    assert own["num_clients"] == 4


def test_images_of_another_source_are_a_candidate(tmp_path: Path) -> None:
    """One grey image over and over: every client says the same on all of its rows."""
    write_cifar10(tmp_path, generated(200, 10), generated(50, 10, seed=1))
    write_cifar100(tmp_path, generated(200, 100, seed=2), generated(100, 100, seed=3))
    np.save(tmp_path / "grey.npy", np.full((30, 32, 32, 3), 128, dtype=np.uint8))
    small = ["task.num_clients=4", "concurrency=2", "algorithm.inner.buffer_size=2", "task.width=2", "task.num_unlabeled=20"]
    small += ["local.num_local_steps=1", f"task.data_dir={tmp_path}", "task.partition.alpha=10.0"]
    simulate(load("cifar10", versions=2, settings=small), out=tmp_path / "run")
    own, grey = inspected(tmp_path / "run", "--unlabeled", str(tmp_path / "grey.npy"))
    assert (own["rows"], grey["rows"]) == (20, 20)
    assert own["accuracy_before"] == grey["accuracy_before"], "the same clients' models"
    assert grey["agreement"] * grey["num_clients"] == pytest.approx(round(grey["agreement"] * grey["num_clients"])), (
        "all or none"
    )


GOOD = InspectedU(
    unlabeled="U",
    rows=100,
    entropy=0.3,
    balance=0.9,
    least_class=4,
    least_coverage=8,
    num_clients=20,
    agreement=0.8,
    lowest_agreement=0.5,
    shift=0.2,
    accuracy_before=0.7,
    accuracy_after=0.75,
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "good"),
        ({"entropy": 0.95}, "the teacher is nearly uniform: U is too far from the clients' data"),
        ({"least_coverage": 1}, "class 4 has evidence from 1 of 20 clients: add examples that show it, or more clients"),
        ({"balance": 0.5}, "U shows few classes: balance it, or set shared_prior=1 with prior_correction"),
        ({"accuracy_after": 0.6}, "distillation lowers accuracy: use another U, or a lower distill_lr"),
    ],
)
def test_the_verdict_names_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    assert replace(GOOD, **changed).verdict == said


def test_a_u_may_have_several_faults() -> None:
    assert replace(GOOD, entropy=0.95, balance=0.1).verdict.count(";") == 1


def test_runs_that_cannot_be_inspected_are_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    assert "is not a run folder: it has no run.jsonl" in refused(str(tmp_path / "nowhere"))
    simulate(load("digits", algorithm="fedbuff", versions=1, settings=SMALL), out=tmp_path / "fedbuff")
    assert "is a run without distillation: inspect a run of fedecho or fedecho+" in refused(str(tmp_path / "fedbuff"))

    def stop(moment: Any, scores: Any) -> None:
        raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        simulate(load("digits", versions=2, settings=SMALL), out=tmp_path / "stopped", checkpoint_s=0.0, watch=stop)
    assert "holds an unfinished run: continue it with `fedecho resume" in refused(str(tmp_path / "stopped"))
    assert "--unlabeled takes settings of the task, such as task.unlabeled=stl10, got local.client_lr=1" in refused(
        str(run), "--unlabeled", "local.client_lr=1"
    )
    assert "unknown key 'task.unlabeled'" in refused(str(run), "--unlabeled", "stl10")
    assert "--clients must be at least 1" in refused(str(run), "--clients", "0")


def test_a_deployed_run_is_refused(run: Path, tmp_path: Path) -> None:
    header, *rest = (run / "run.jsonl").read_text().splitlines(keepends=True)
    deployed = json.loads(header) | {"execution": {"executor": "flower"}}
    (tmp_path / "run.jsonl").write_text(json.dumps(deployed) + "\n" + "".join(rest))
    assert "holds a deployed run: its clients' data are on the nodes" in refused(str(tmp_path))

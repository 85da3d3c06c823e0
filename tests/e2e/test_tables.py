"""``fedecho table``, ``cost`` and ``data`` as a user types them, on generated images in the official files."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from docs.make_derived import MADE, PAGES, with_tables
from official_files import generated, write_cifar10
from rich.console import Console
from tests.e2e.test_durability import files_of_at_most
from typer.testing import CliRunner

from fedecho import load
from fedecho.cli import app
from fedecho.cli.tables import TABLES
from fedecho.paper.rendering import View, as_text, notes_of
from fedecho.paper.results import read_result
from fedecho.paper.text_tables import first_of
from fedecho.runs.config import to_config
from fedecho.runs.folder import locked_file, locked_folder

ROOT = Path(__file__).parents[2]
SMALL = [
    "task.num_clients=6",
    "task.width=2",
    "task.num_unlabeled=20",
    "task.partition.alpha=1.0",
    "concurrency=5",
    "num_versions=2",
]
ABLATED = [("samples", "2000 samples"), ("alpha", "dynamic alpha"), ("clip", "nu=5")]
SMALL += ["local.num_local_steps=1", "algorithm.distiller.batch_size=10"]


def fedecho(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def records(*words: str) -> list[dict[str, str]]:
    """What another program reads."""
    return list(csv.DictReader(io.StringIO(fedecho(*words, "--format", "csv"))))


@pytest.fixture
def small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that run FedEcho's cell with CIFAR-100 as U, small, on the CPU."""
    data = tmp_path / "data"
    data.mkdir()
    write_cifar10(data, generated(100, 10), generated(20, 10, seed=1))
    np.save(data / "cifar100-32.npy", generated(40, 10, seed=2)[0])
    monkeypatch.setenv("FEDECHO_DATA", str(data))
    monkeypatch.chdir(tmp_path)
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return [
        "table",
        "cifar10",
        "--only",
        "fedecho-cifar-100-large-dir-0.1",
        "--seeds",
        "0,1",
        "--executor",
        "serial",
        "--results",
        "mine",
        *settings,
    ]


def test_a_table_runs_what_is_missing_once_and_shows_it_beside_the_papers(small_table: list[str], tmp_path: Path) -> None:
    said = fedecho(*small_table)
    assert "75.39 ± 2.93" in said
    kept = sorted((tmp_path / "mine" / "cifar10").iterdir())
    assert [path.name for path in kept] == [f"fedecho-cifar-100-large-dir-0.1-seed{seed}.json" for seed in (0, 1)]
    result = json.loads(kept[0].read_text())
    assert {"summary", "evaluations", "config", "execution", "software", "commit", "unlabeled"} <= set(result)
    assert "cifar100-32.npy" in result["unlabeled"]
    before = [path.stat().st_mtime_ns for path in kept]
    mine = next(row for row in records(*small_table) if row["method"] == "FedEcho (CIFAR-100)")
    assert [path.stat().st_mtime_ns for path in kept] == before
    values = [100 * json.loads(path.read_text())["summary"]["last10_accuracy"] for path in kept]
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in said
    finals = [100 * json.loads(path.read_text())["evaluations"][-1]["accuracy"] for path in kept]
    bests = [100 * max(line["accuracy"] for line in json.loads(path.read_text())["evaluations"]) for path in kept]
    means = [np.mean(values), np.std(values, ddof=1), np.mean(finals), np.mean(bests)]
    names = ("seeds", "diverged", "ours", "deviation", "final", "best", "paper", "paper deviation")
    assert [float(mine[name]) for name in names] == pytest.approx([2, 0, *means, 75.39, 2.93], abs=1e-4)
    points = np.mean(values) - 75.39
    assert [float(mine[name]) for name in ("gap", "gap in deviations")] == pytest.approx([points, abs(points) / 2.93], abs=1e-4)
    assert f"{points:+.1f} ({abs(points) / 2.93:.1f})" in said
    assert mine["setting"] == "large Dir(0.1)"
    assert "cifar100-32.npy" in mine["unlabeled"]
    assert "torch" in mine["hardware"]
    (each,) = records(*small_table, "--by-seed")
    assert [float(each[f"seed {seed}"]) for seed in (0, 1)] == pytest.approx(values, abs=1e-4)


def test_a_cell_that_diverges_is_kept_as_such_and_not_tried_again(small_table: list[str], tmp_path: Path) -> None:
    wild = [*small_table, "--set", "local.client_lr=1e30"]
    wild[wild.index("0,1")] = "0"
    said = fedecho(*wild)
    assert "diverged" in said
    (kept,) = (tmp_path / "mine" / "cifar10").iterdir()
    result = json.loads(kept.read_text())
    assert "lower local.client_lr" in result["diverged"]
    assert result["summary"] == {"num_versions": 0}
    before = kept.stat().st_mtime_ns
    (mine,) = records(*wild)
    assert [mine[name] for name in ("seeds", "diverged", "ours", "deviation", "best")] == ["1", "1", "", "", ""]
    assert kept.stat().st_mtime_ns == before
    assert "was made with other settings (local.client_lr is 1e+30 there and 0.03 here)" in fedecho(*small_table, code=2)
    result["config"]["local"]["client_lr"] = 0.03
    kept.write_text(json.dumps(result))
    assert re.search(r"\d+\.\d\d \(1 diverged\)", fedecho(*small_table, "--format", "markdown"))
    (mine,) = records(*small_table)
    assert [mine["seeds"], mine["diverged"]] == ["2", "1"]


def test_a_dry_run_runs_nothing(small_table: list[str], tmp_path: Path) -> None:
    said = fedecho(*small_table, "--dry-run")
    assert "2 cells to run" in said
    assert not (tmp_path / "mine").exists()


def test_a_dry_run_counts_by_versions_and_what_is_not_trained_apart(
    small_table: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From 4 s for 500 versions of FedBuff and 60 s for the model as it was."""
    for name, cell_slug, num_versions, real_s in (
        ("cifar10", "fedbuff-large-dir-0.1-seed0", 500, 4.0),
        ("gsm8k", "before-training-smollm2-135m-5-versions-seed0", 0, 60.0),
        ("gsm8k", "fedbuff-smollm2-135m-5-versions-seed0", 5, 10.0),
    ):
        kept = json.loads((ROOT / "results" / "cifar10" / "fedbuff-large-dir-0.1-seed0.json").read_text())
        kept["summary"] |= {"num_versions": num_versions, "real_s": real_s}
        kept["config"] = to_config(next(cell for cell in TABLES[name].cells((0,)) if cell.slug == cell_slug).experiment())
        target = tmp_path / "mine" / name / f"{cell_slug}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(kept))
    said = fedecho("table", "cifar10", "--only", "fedbuff-large", "--results", "mine", "--dry-run")
    assert "fedbuff-large-dir-0.1-seed1  4 s" in said
    said = fedecho("table", "gsm8k", "--only", "versions-seed", "--results", "mine", "--dry-run")
    assert "fedbuff-smollm2-135m-45-versions-seed0  90 s" in said
    assert "ca2fl-smollm2-135m-5-versions-seed0  ?" in said
    assert "before-training-qwen2.5-1.5b-5-versions-seed0  ?" in said, "which is another model"
    assert said.count("before-training") == 1, "the versions of a column do not matter"
    assert "cells to run: 5 min by the times of earlier runs (NVIDIA H200), " in said
    said = fedecho("table", "gsm8k", "--only", "before", "--seeds", "1,2", "--results", "mine", "--dry-run")
    assert said.count("before-training") == 1, "nor does the seed: there is nothing random in it"


def test_settings_that_were_not_there_are_others_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a configuration leaves out has its default."""
    monkeypatch.chdir(ROOT)
    cell = next(cell for cell in TABLES["mrpc"].cells((0,)) if cell.slug == "fedbuff-minilm-seed0")
    assert read_result(ROOT / "results", cell) is not None
    for setting in ("task.max_length=16", "record_every=5"):
        with pytest.raises(ValueError, match="made with other settings"):
            read_result(ROOT / "results", replace(cell, own=(setting,)))


def test_a_model_that_is_not_trained_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (row,) = records("table", "gsm8k", "--show", "--only", "before", "--only", "smollm2-135m-5")
    assert [row["method"], row["seeds"]] == ["before training", "1"]
    assert [float(row[name]) for name in ("ours", "s.e.", "loss")] == pytest.approx([2.1228, 0.3969, 1.3311], abs=2e-4)


def test_words_pick_rows_as_well_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ("table", "cifar10", "--show", "--only", "large-dir-0.1")
    rows = records(*words, "--only", "fedecho")
    paper = [row["method"] for row in rows if row["paper"]]
    assert paper == ["FedEcho (CIFAR-100)", "FedEcho (STL10)", "FedEcho (synthetic)"]
    assert all("fedecho" in row["method"].lower() for row in rows)
    rows = records(*words, "--without", "control", "--without", "fedecho")
    assert [row["method"] for row in rows] == ["FedBuff", "CA2FL", "FedAC", "FADAS"]
    assert "cifar10 has no cell whose name contains large-dir-0.1 but not a" in fedecho(*words, "--without", "a", code=2)
    assert "must be one of serial" in fedecho("table", "cifar10", "--dry-run", "--executor", "nonsense", code=2)


def test_a_comma_is_an_or(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    both = records("table", "mrpc", "--show", "--only", "CA2FL, fadas", "--only", "minilm", "--without", "server,control")
    assert [line["method"] for line in both] == ["CA2FL", "FADAS"]
    assert "no cell" in fedecho("table", "mrpc", "--show", "--only", ",", code=2)


def test_words_pick_seeds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ("table", "cifar10", "--show", "--only", "fedbuff-large-dir-0.1", "--format", "csv")
    one = fedecho(*words, "--seeds", "1")
    assert fedecho(*words, "--only", "seed1") == one
    assert fedecho(*words, "--without", "seed0", "--without", "seed2") == one


DAMAGES: list[dict[str, object]] = [
    {"summary": {}},
    {"summary": {"num_versions": 1, "last10_accuracy": 10**400}},
    {"evaluations": []},
    {"evaluations": 5},
    {"evaluations": [{"version": 1, "time": 1.0}, None]},
    {"notes": 3},
    {"notes": {"stand_in": -1.5}},
    {"software": {}},
    {"unlabeled": 7},
    {"cell": []},
    {"config": {"task": json.loads("[" * 500 + "]" * 500)}},
    {"weather": "fine"},
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage)[:40])
def test_a_damaged_result_is_named(tmp_path: Path, damage: dict[str, object]) -> None:
    name = "fedbuff-large-dir-0.1-seed0.json"
    (tmp_path / "cifar10").mkdir()
    kept = json.loads((ROOT / "results" / "cifar10" / name).read_text())
    (tmp_path / "cifar10" / name).write_text(json.dumps(kept | damage))
    said = fedecho("table", "cifar10", "--show", "--results", str(tmp_path), code=2)
    assert f"{name} is damaged" in " ".join(said.split())


def test_a_score_that_is_no_number_is_not_in_a_table(tmp_path: Path) -> None:
    name = "fedbuff-minilm-seed0.json"
    (tmp_path / "mrpc").mkdir()
    kept = json.loads((ROOT / "results" / "mrpc" / name).read_text())
    kept["evaluations"][-1]["f1"] = {"a": 1}
    (tmp_path / "mrpc" / name).write_text(json.dumps(kept))
    assert "FedBuff" in fedecho("table", "mrpc", "--show", "--results", str(tmp_path))


def test_settings_of_ones_own_stand_in_the_title(small_table: list[str]) -> None:
    assert "with task.num_clients=6 task.width=2" in " ".join(fedecho(*small_table, "--seeds", "0").split())
    assert "\n\nWith task.num_clients=6 task.width=2 " in fedecho(*small_table, "--seeds", "0", "--format", "markdown")
    assert records(*small_table, "--seeds", "0")[0]["with"].startswith("task.num_clients=6 task.width=2 ")


def test_results_that_are_nowhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "nowhere", tmp_path / "file"):
        assert f"there is no folder {place}" in " ".join(
            fedecho("table", "cifar10", "--show", "--results", str(place), code=2).split()
        )


def test_a_run_serves_every_table_it_belongs_in(small_table: list[str], tmp_path: Path) -> None:
    """The paper's own values stand in all three ablations: what cifar10 has run is not run again."""
    fedecho(*small_table)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*.json")}
    assert len(kept) == 2
    settings = small_table[small_table.index("--seeds") :]
    for name, row in (("samples", "2000-samples"), ("alpha", "dynamic-alpha"), ("clip", "nu=5")):
        mine = next(line for line in records("table", name, "--only", row, *settings) if line["seeds"] == "2")
        assert [mine["paper"], mine["paper deviation"]] == ["75.39", "2.93"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*.json")} == kept


def test_a_cell_that_two_rows_share_is_run_once(small_table: list[str], tmp_path: Path) -> None:
    """Seed 0's partition is seed 0's own."""
    words = ["--only", "fadas", "--only", "large-dir-0.1", *small_table[small_table.index("--seeds") : -2], "--seeds", "0"]
    assert "2 cells to run" in fedecho("table", "cifar10", *words, "--dry-run")
    fedecho("table", "cifar10", *words)
    kept = sorted(path.name for path in (tmp_path / "mine").rglob("*.json"))
    assert kept == ["control-fadas-seed-1-s-partition-large-dir-0.1-seed0.json", "fadas-large-dir-0.1-seed0.json"]


@pytest.mark.parametrize("begun", [True, False], ids=["in its run", "before or after its run"])
def test_a_cell_that_another_process_runs_is_passed_over(small_table: list[str], tmp_path: Path, begun: bool) -> None:
    name = "fedecho-cifar-100-large-dir-0.1-seed0"
    folder = tmp_path / "runs" / "tables" / "cifar10" / name
    folder.parent.mkdir(parents=True)
    with locked_folder(folder, print) if begun else locked_file(folder.with_name(f"{name}.lock"), folder, print):
        result = CliRunner().invoke(app, small_table)
    assert result.exit_code == 0, result.output
    assert f"{name}: skipped" in " ".join(result.stderr.split())
    assert [path.stem for path in (tmp_path / "mine" / "cifar10").iterdir()] == [name.replace("seed0", "seed1")]
    assert "75.39 ± 2.93" in result.stdout


def test_processes_share_the_cells_of_a_table(small_table: list[str], tmp_path: Path) -> None:
    """The same command twice at once: each takes what nobody has taken, and both show the whole table."""
    words = [sys.executable, "-m", "fedecho", *small_table, "--seeds", "0,1,2,3"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    results = sorted((tmp_path / "mine").rglob("*.json"))
    assert [json.loads(result.read_text())["summary"]["seed"] for result in results] == [0, 1, 2, 3]
    assert all("75.39 ± 2.93" in out for out, _ in said)
    trained = [set(re.findall(r"(\S+seed\d): version \d+/", err)) for _, err in said]
    assert not trained[0] & trained[1]
    assert len(trained[0] | trained[1]) == 4


def test_several_cells_at_once_are_those_of_one_after_another(small_table: list[str], tmp_path: Path) -> None:
    shown = [fedecho(*small_table, "--results", f"by{jobs}", "--runs", f"runs{jobs}", "--jobs", jobs) for jobs in ("1", "2")]
    assert shown[0] == shown[1]
    for seed in (0, 1):
        one, two = (tmp_path / f"by{jobs}" / "cifar10" / f"fedecho-cifar-100-large-dir-0.1-seed{seed}.json" for jobs in (1, 2))
        digests = {json.loads(path.read_text())["summary"]["model_sha256"] for path in (one, two)}
        assert len(digests) == 1


def test_what_is_wrong_with_one_cell_is_said_once_whatever_the_jobs(small_table: list[str], tmp_path: Path) -> None:
    name = "fedecho-cifar-100-large-dir-0.1-seed0"
    broken = tmp_path / "runs" / "tables" / "cifar10" / name / "run.jsonl"
    broken.parent.mkdir(parents=True)
    broken.write_text("no record\n")
    said = [fedecho(*small_table, "--jobs", jobs, code=2) for jobs in ("1", "2")]
    # The other cell may have finished before a second job found this one damaged.
    one, two = ([line for line in text.splitlines() if not line.startswith(name.replace("seed0", "seed1"))] for text in said)
    assert one == two
    assert len(one) == 1
    assert broken.read_text() == "no record\n"


def test_only_the_same_experiment_is_shared() -> None:
    shared = {cell: first_of(cell) for table in TABLES.values() for cell in table.cells((0, 1)) if first_of(cell) != cell}
    for cell, kept in shared.items():
        ours, theirs = cell.experiment(), kept.experiment()
        assert ours == theirs or (cell.row.untrained and kept.row.untrained and ours.task == theirs.task)
        assert cell.seed == kept.seed
        assert first_of(kept) == kept
    assert {(cell.table, cell.row.label, cell.seed) for cell in shared} == {
        *((table, row, seed) for table, row in ABLATED for seed in (0, 1)),
        *(("cifar10", f"control: FADAS, seed {seed}'s partition", seed) for seed in (0, 1)),
        ("gsm8k", "before training", 0),
        *(("straggler-ablations", method, seed) for method in ("FedEcho", "FedEcho+") for seed in (0, 1)),
    }


def test_what_has_run_and_what_has_not_are_two_questions(small_table: list[str]) -> None:
    assert "choose one" in fedecho(*small_table, "--show", "--dry-run", code=2)


def test_mistakes_are_one_line(small_table: list[str]) -> None:
    assert "unknown table" in fedecho("table", "cifar11", code=2)
    assert "no cell" in fedecho("table", "cifar10", "--only", "nothing", code=2)
    assert "--format" in fedecho("table", "cifar10", "--format", "pdf", code=2)
    assert "NVIDIA GPU" in fedecho("table", "cifar10", "--only", "fedbuff-large-dir-0.1-seed0", "--only", "seed0", code=2)
    assert "--results" in fedecho("table", "cifar10", "--set", "num_versions=1", code=2)
    assert "--seeds" in fedecho("table", "cifar10", "--set", "seed=1", "--results", "mine", code=2)
    assert "--jobs must be at least 1, got 0" in fedecho(*small_table, "--jobs", "0", code=2)
    assert "--checkpoint-every must be at least 0" in fedecho(*small_table, "--checkpoint-every", "-1", code=2)
    missing = fedecho("run", "cifar10", "--data-dir", "nowhere", code=2)
    assert "fedecho data fetch cifar10" in missing
    assert "one of cifar10, cifar100, stl10" in fedecho("data", "fetch", "cifar11", code=2)
    assert "nowhere" in fedecho("data", "synthesize", "./nowhere", code=2)


def test_cost_names_what_fedecho_pays() -> None:
    said = fedecho("cost", "digits", "--algorithms", "fedbuff,ca2fl,fedecho", "--versions", "1")
    state = {
        line.split()[0]: float(line.split()[-1]) for line in said.splitlines() if line.strip().startswith(("fed", "ca2fl"))
    }
    vector = 4 * sum(param.numel() for param in load("digits").task.network(0).parameters()) / 1e6
    assert state["ca2fl"] == pytest.approx(state["fedbuff"] + 21 * vector, abs=0.02), "20 clients' updates and their mean"
    assert state["fedecho"] == pytest.approx(state["fedbuff"] + 2 * vector, abs=0.02), (
        "Adam's two moments; the bank stands apart"
    )
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip().startswith("fed")}
    assert float(rows["fedbuff"][0]) == float(rows["fedbuff"][1]) == 0
    assert min(float(rows["fedecho"][0]), float(rows["fedecho"][1])) > 0
    assert rows["fedbuff"][2] == rows["fedecho"][2]  # the same schedule
    assert f"CPU, torch {torch.__version__}; seconds are the server's, mean over --versions 1 after one" in said


@pytest.mark.parametrize("form", ["text", *(pytest.param(form, marks=pytest.mark.slow) for form in ("csv", "markdown"))])
def test_a_reader_that_has_seen_enough(form: str) -> None:
    """As `| head` does, and before anything is printed."""
    command = [sys.executable, "-m", "fedecho", "table", "cifar10", "--show", "--format", form]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=buffered)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    said = running.stderr.read().decode()
    running.stderr.close()
    assert (running.wait(), said) == (1, "")


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_table_is_an_experiment_of_its_own(name: str) -> None:
    cells = list(TABLES[name].cells((0, 1)))
    assert len({cell.slug for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.experiment().seed == cell.seed


@pytest.mark.parametrize("page", [page for page in PAGES if MADE.search(page.read_text())], ids=lambda page: page.stem)
def test_tables_on_pages_are_what_the_results_say(page: Path) -> None:
    assert with_tables(page.read_text()) == page.read_text(), "run: python docs/make_derived.py"


def test_every_table_that_has_run_stands_on_a_page() -> None:
    """README has CIFAR-10's; another that is typed by hand would be found by nobody when it is wrong."""
    shown = {found[1].split()[1] for page in PAGES for found in MADE.finditer(page.read_text())}
    assert shown == {"cifar10", "mrpc", "gsm8k", "stragglers", "straggler-ablations"}


def test_files_that_are_not_those_of_the_others_are_told(tmp_path: Path) -> None:
    """Two runs of one model by name, whose weights were not the same."""
    view = View(TABLES["mrpc"], tmp_path, (0, 1, 2))
    (tmp_path / "mrpc").mkdir()
    for seed in (0, 1, 2):
        kept = json.loads((ROOT / "results" / "mrpc" / f"fedbuff-minilm-seed{seed}.json").read_text())
        kept["notes"]["model files"] = "sha256 aaa, tokenizer sha256 ccc" if seed == 1 else "sha256 bbb"
        (tmp_path / "mrpc" / f"fedbuff-minilm-seed{seed}.json").write_text(json.dumps(kept))
    assert (
        notes_of(view)[-1] == "all-MiniLM-L6-v2: files of sha256 aaa... in fedbuff-minilm-seed1, of sha256 bbb... in the others"
    )


def test_results_name_no_place_of_a_machine() -> None:
    found = [path for table in TABLES for path in (ROOT / "results" / table).glob("*.json")]
    assert found
    for path in found:
        result = json.loads(path.read_text())
        assert "data_dir" not in result["config"]["task"], path
        assert re.fullmatch(r"[0-9a-f]{40}", result["commit"]), path


@pytest.mark.skipif(not (ROOT.parent / "shared" / "data").is_dir(), reason="no shared/data beside the repository")
def test_a_short_run_on_the_real_cifar10(tmp_path: Path) -> None:
    import subprocess

    restore = ROOT.parent / "shared" / "data" / "restore.py"
    done = subprocess.run([sys.executable, restore, tmp_path, "cifar10", "cifar100-32"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    small = [f"task.data_dir={tmp_path}", "task.width=4", "local.num_local_steps=2", "task.num_unlabeled=50"]
    words = [word for setting in small for word in ("--set", setting)]
    said = fedecho("run", "cifar10", "--versions", "2", "--out", str(tmp_path / "run"), *words)
    assert "accuracy" in said


def test_a_narrow_terminal_folds_words_and_cuts_no_figure() -> None:
    """All of the repository's own results on MRPC, which has the widest tables, in 80 columns."""
    narrow = Console(width=80, file=io.StringIO(), record=True)
    view = View(TABLES["mrpc"], ROOT / "results", (0, 1, 2))
    for shown in as_text(view):
        narrow.print(shown)
    text = narrow.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    figures = [view.figure(row, column) for row in view.table.rows for column in view.table.columns]
    for figure in figures:
        assert all(word in text for word in (figure.ours, figure.paper, *figure.scores))
    assert any(figure.ours for figure in figures)


def test_in_a_file_no_word_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    text = fedecho("table", "mrpc", "--show", "--only", "minilm", "--by-seed")
    assert "control: FedEcho, distillation batch 8  74.36  74.36" in re.sub(" {2,}", "  ", text)


def test_rows_of_our_own_that_have_not_run_are_left_out_but_not_from_a_file_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = ("table", "gsm8k", "--only", "smollm2-135m-45")
    own, paper = "control: FedEcho, distill_lr 2e-5", ("FedEcho", "FADAS", "before training")
    assert own.lower().split(", ")[1].replace(" ", "-").replace("_", "-") in fedecho(*words, "--dry-run")
    for form in ("text", "markdown"):
        shown = fedecho(*words, "--show", "--format", form)
        assert own not in shown
        assert all(row in shown for row in paper)
    assert own in [line["method"] for line in records(*words, "--show")]
    both = fedecho("table", "gsm8k", "--show", "--format", "markdown", "--only", "smollm2", "--only", "2e-5")
    assert own in both, "it has run for the other column"
    empty = ("table", "mrpc", "--show", "--results", str(tmp_path))
    assert "FedEcho" in fedecho(*empty, "--format", "markdown"), "rows of the paper's are there before they have run"
    asked = fedecho(*empty, "--only", "u-all", "--format", "markdown")
    assert "U all test pairs" in asked, "what was asked for is not left out where it is all"


def test_a_program_is_told_which_seeds_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = {line["method"]: line for line in records("table", "mrpc", "--show", "--only", "minilm", "--by-seed")}
    assert found["FedAC"]["diverged seeds"] == "0 1 2"
    assert found["FedBuff"]["diverged seeds"] == ""


def test_how_often_checkpoints_are_written_is_for_the_user_to_say(small_table: list[str], tmp_path: Path) -> None:
    """Where all files fit but a checkpoint, which is larger than the model."""
    never, always = ("--checkpoint-every", "1000"), ("--checkpoint-every", "0")
    fedecho(*small_table, "--seeds", "0", *never)
    largest = max(path.stat().st_size for path in (tmp_path / "runs").rglob("*") if path.is_file())
    with files_of_at_most(largest + 1000):
        fedecho(*small_table, "--seeds", "1", *never)
        assert re.search("the disk is full: cannot write .*checkpoint-", fedecho(*small_table, "--seeds", "2", *always, code=1))


def test_a_cell_begun_on_a_gpu_does_not_end_on_a_cpu(small_table: list[str], tmp_path: Path) -> None:
    """Its result would name a GPU that the end of it never saw."""
    fedecho(*small_table, "--seeds", "0")
    next((tmp_path / "mine").rglob("*.json")).unlink()
    record = next((tmp_path / "runs").rglob("run.jsonl"))
    on_gpu = '"execution":{"device":"a GPU","precision":"fp32","deterministic":true,'
    record.write_text(record.read_text().replace('"execution":{', on_gpu, 1))
    said = fedecho(*small_table, "--seeds", "0", code=2)
    assert "was computed on a GPU in fp32, deterministic, but is to be resumed on a CPU" in said

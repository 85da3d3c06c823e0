"""A user's mistake is one clear line, exit code 2, no traceback, and nothing overwritten."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedecho import load, simulate
from fedecho.cli import app


def fedecho(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def one_clear_line(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    said = result.stderr.strip()
    assert "\n" not in said
    assert "Traceback" not in said
    for part in parts:
        assert part in said


def test_workers_without_an_executor_that_has_them_are_refused() -> None:
    one_clear_line(fedecho("run", "digits", "--workers", "3"), "--workers 3", "pool, ray or cuda")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("algorithm.inner.buffer_size=11", ["buffer_size of 11", "concurrency of 10"]),
        ("concurrency=21", ["concurrency", "num_clients = 20", "21"]),
        ("concurrency=0", ["concurrency", "0"]),
        ("task.num_clients=0", ["num_clients", "0"]),
        ("task.num_clients=-3", ["num_clients", "-3"]),
        ("algorithm.inner.buffer_size=0", ["buffer_size", "at least 1"]),
        ("local.batch_size=0", ["batch_size", "at least 1"]),
        ("local.epochs=-1", ["epochs", "-1"]),
        ("local.client_lr=0", ["client_lr", "above 0"]),
        ("local.client_lr=1e39", ["local.client_lr", "within 3.4e38", "1e+39"]),
        ("local.client_lr=true", ["local.client_lr", "a number", "True"]),
        ("local.client_lr=fast", ["local.client_lr", "a number", "'fast'"]),
        ("local.epochs=1.5", ["local.epochs", "a whole number", "1.5"]),
        ("local.client_rl=0.1", ["local.client_rl", "did you mean 'client_lr'"]),
        ("lcoal.client_lr=0.1", ["lcoal", "did you mean 'local'"]),
        ("task.partition.alpha=0", ["alpha", "above 0"]),
        ("task.partition.name=dirichelt", ["dirichelt", "did you mean 'dirichlet'"]),
        ("runtimes.profile=huge", ["runtimes.profile", "'large' or 'mild'"]),
        ("runtimes.trace=nowhere.csv", ["nowhere.csv"]),
        ("faults.dropout=1", ["dropout", "below 1"]),
        ("algorithm.distiller.alpha_min=2", ["algorithm.distiller.alpha_min must be between 0 and 1", "2.0"]),
        ("faults.available_s=10", ["available_s", "unavailable_s"]),
        ("algorithm.distiller.alpha_min=0.9", ["alpha_min", "alpha_max"]),
        ("algorithm.distiller.clip_norm=nan", ["clip_norm"]),
        ("task.num_unlabeled=0", ["unlabeled set"]),
        ("num_versions=0", ["num_versions", "at least 1"]),
        ("num_versions", ["key=value"]),
        ("task.num_clients=2000", ["1137 examples", "2000"]),
        ("algorithm=5", ["algorithm must be a table"]),
    ],
)
def test_a_wrong_value_is_named(setting: str, parts: list[str], tmp_path: Path) -> None:
    one_clear_line(fedecho("run", "digits", "--set", setting), *parts)
    assert not list(tmp_path.rglob("summary.json"))


def test_unknown_names() -> None:
    one_clear_line(fedecho("run", "digits", "--algorithm", "fedbuf"), "fedbuf", "did you mean 'fedbuff'")
    one_clear_line(fedecho("run", "digitz"), "digitz", "did you mean 'digits'")
    one_clear_line(fedecho("compare", "digits", "--algorithms", "fedbuff,nothing"), "nothing")
    one_clear_line(fedecho("compare", "digits", "--seeds", "0,x"), "--seeds", "0,x")
    one_clear_line(fedecho("compare", "digits", "--jobs", "0"), "--jobs")
    one_clear_line(fedecho("compare", "digits", "--algorithms", ","), "--algorithms")
    one_clear_line(fedecho("run", "digits", "--executor", "poll"), "--executor", "serial, pool")
    one_clear_line(fedecho("run", "digits", "--workers", "0"), "--workers")
    one_clear_line(fedecho("run", "digits", "--executor", "pool", "--workers", "100000"), "--workers 100000", "at most")


def test_toml_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = \n")
    one_clear_line(fedecho("run", str(broken)), "broken.toml", "line 1")
    one_clear_line(fedecho("run", "absent.toml"), "absent.toml")
    (tmp_path / "empty.toml").write_text("")
    one_clear_line(fedecho("run", "empty.toml"), "task is missing")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    one_clear_line(fedecho("run", "binary.toml"), "binary.toml")
    (tmp_path / "unknown.toml").write_text('recipe = "digits"\nconcurency = 3\n')
    one_clear_line(fedecho("run", "unknown.toml"), "concurency", "did you mean 'concurrency'")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    one_clear_line(fedecho("run", "digits", "--out", str(tmp_path / "run")), "cannot write")


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    one_clear_line(fedecho("run", "digits", "--out", "file"), "file is a file")
    one_clear_line(fedecho("run", "digits", "--out", "file/run"), "file")
    one_clear_line(fedecho("run", "digits", "--out", "/proc/nowhere"), "/proc")
    assert (tmp_path / "file").read_text() == "mine"
    one_clear_line(fedecho("resume", "absent"), "absent", "no run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.jsonl").write_text("something else\n")
    one_clear_line(fedecho("resume", "other"), "damaged or of another program")
    assert (tmp_path / "other" / "run.jsonl").read_text() == "something else\n"


def test_a_folder_that_holds_a_model_of_somebody_elses_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"weights")
    one_clear_line(fedecho("run", "digits", "--versions", "1", "--out", "bert"), "model.safetensors is not of a run")
    assert [path.name for path in (tmp_path / "bert").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "bert" / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_that_holds_a_run_is_not_touched(tmp_path: Path) -> None:
    short = ["--versions", "2", "--set", "local.num_local_steps=1", "--set", "task.width=1"]
    assert fedecho("run", "digits", *short, "--out", "run").exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    one_clear_line(fedecho("run", "digits", *short, "--out", "run"), "already holds a run", "finished")
    one_clear_line(fedecho("compare", "digits", *short, "--out", "run"), "run holds a run", "another --out")
    assert fedecho("resume", "run").exit_code == 0  # finished: says so, changes nothing
    (tmp_path / "compared").mkdir()
    (tmp_path / "run").rename(tmp_path / "compared" / "fedecho-seed0")
    other = ["--algorithms", "fedecho", "--seeds", "0", "--out", "compared", "--versions", "3"]
    one_clear_line(fedecho("compare", "digits", *other), "another configuration", "num_versions is 2 there and 3 here")
    assert {path.name: path.read_bytes() for path in (tmp_path / "compared" / "fedecho-seed0").iterdir()} == before


def test_a_record_of_another_configuration_than_its_checkpoint(tmp_path: Path) -> None:
    def stop(moment: object, scores: object) -> None:
        if list(tmp_path.glob("run/checkpoint-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(load("digits", versions=3), out=tmp_path / "run", checkpoint_s=0.0, watch=stop)
    record = tmp_path / "run" / "run.jsonl"
    record.write_text(record.read_text().replace('"client_lr":0.05', '"client_lr":0.06', 1))
    one_clear_line(fedecho("resume", "run"), "another configuration")

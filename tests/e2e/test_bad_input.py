"""A user's mistake is one clear line, exit code 2, no traceback, and nothing overwritten."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fedecho import load, simulate
from fedecho.cli import app
from fedecho.tasks.vision.unlabeled import read_unlabeled


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
        ("algorithm.inner.buffer_size=11", ["buffer_size is 11", "only 10 clients"]),
        ("concurrency=21", ["concurrency", "num_clients = 20", "21"]),
        ("concurrency=0", ["concurrency", "0"]),
        ("task.num_clients=0", ["num_clients", "0"]),
        ("task.num_clients=-3", ["num_clients", "-3"]),
        ("algorithm.inner.buffer_size=0", ["buffer_size", "at least 1"]),
        ("local.batch_size=0", ["batch_size", "at least 1"]),
        ("local.epochs=-1", ["epochs", "-1"]),
        ("local.client_lr=0", ["client_lr", "above 0"]),
        ("local.client_lr=1e39", ["local.client_lr", "between -3.4e38 and 3.4e38", "1e+39"]),
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


BEYOND = 2**62
LONG = "123456789012345678901234567890"


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("attack.target=10", ["attack.target is 10", "the task has 10 classes", "0 to 9"]),
        (f"task.width={BEYOND}", ["task.width must be at most 4096", str(BEYOND), "from 1 to 4096"]),
        ("task.num_clients=1000000000", ["task.num_clients must be at most 100000000", "got 1000000000", "from 1 to"]),
        ("num_versions=1000000000", ["num_versions must be at most 10000000", "got 1000000000", "from 1 to"]),
        ("versions=0", ["num_versions must be at least 1", "got 0", "from 1 to"]),
        ("concurrency=1000000000", ["concurrency must be at most 1000000", "got 1000000000"]),
        ("seed=" + LONG, ["--set 'seed'", "an integer must fit into 64 bits"]),
        ("task.seed=-9223372036854775809", ["--set 'task.seed'", "fit into 64 bits"]),
        ("algorithm.distiller.distill_lr=1e38", ["algorithm.distiller.distill_lr must be at most 1000000000", "1e+38"]),
        ("algorithm.distiller.distill_lr=nan", ["distill_lr must be a number"]),
        (f"algorithm.distiller.num_distill_steps={BEYOND}", ["num_distill_steps must be at most 100000", str(BEYOND)]),
        ("algorithm.distiller.eps=inf", ["algorithm.distiller.eps must be at most 1, got inf", "above 0 and at most 1"]),
        ("algorithm.distiller.eps=1e-50", ["algorithm.distiller.eps must be above 0", "float32"]),
        ("algorithm.inner.server_lr=1e38", ["algorithm.inner.server_lr must be at most 1e+30", "1e+38"]),
        ("local.eps=inf", ["local.eps must be at most 1, got inf"]),
        ("local.client_lr=inf", ["local.client_lr must be at most", "got inf"]),
        (f"local.epochs={BEYOND}", ["local.epochs must be at most 1000000", str(BEYOND)]),
        (f"local.num_local_steps={BEYOND}", ["local.num_local_steps must be at most 10000000"]),
        ("faults.available_s=1e-300", ["faults.available_s must be at least 0.001", "1e-300"]),
        ("runtimes.runtime_gamma=inf", ["runtimes.runtime_gamma must be at most"]),
        ("task.partition.alpha=inf", ["task.partition.alpha must be at most 1000000000, got inf"]),
        ("admission.max_norm=inf", ["admission.max_norm must be at most 3.4e+38, got inf"]),
        ("privacy.noise_multiplier=inf", ["privacy.noise_multiplier must be at most", "got inf"]),
        ("local.batch_size=5\nlocal.epochs=1", ["--set needs one key=value on one line"]),
        ("runtimes.trace=~nobodyatall/x.csv", ["~nobodyatall/x.csv"]),
        ("algorithm.distiller.bank_memory=disk", ["algorithm.distiller.bank_memory", "'device'"]),
    ],
)
def test_an_absurd_value_is_refused_when_it_is_set(setting: str, parts: list[str], tmp_path: Path) -> None:
    one_clear_line(fedecho("run", "digits", "--set", setting), *parts)
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "digits", "--versions", "0"], ["--versions must be at least 1, got 0", "from 1 to 10000000"]),
        (["run", "digits", "--versions", "1000000000"], ["--versions must be at most 10000000", "1000000000"]),
        (["run", "digits", "--versions", "1e30"], ["'--versions'", "'1e30'", "integer", "run --help"]),
        (["run", "digits", "--versions", ""], ["'--versions'", "''", "integer"]),
        (["run", "digits", "--seed", LONG], ["--seed must be at most 9223372036854775807", LONG]),
        (["run", "digits", "--seed", "nan"], ["'--seed'", "'nan'"]),
        (["run", "digits", "--workers", "0"], ["--workers must be at least 1, got 0"]),
        (["run", "digits", "--workers", "-1"], ["--workers must be at least 1, got -1"]),
        (["run", "digits", "--workers", "1e30"], ["'--workers'", "'1e30'"]),
        (["run", "digits", "--workers", str(BEYOND)], ["--workers must be at most 100000"]),
        (["run", "digits", "--executor", ""], ["--executor must be one of serial, pool, cuda, ray, got ''"]),
        (["run", "digits", "--device", "tpu"], ["--device must be 'cpu' or 'cuda', got 'tpu'"]),
        (["run", "digits", "--precision", "fp8"], ["--precision must be 'bf16' or 'fp32', got 'fp8'"]),
        (["run", "digits", "--checkpoint-every", "nan"], ["--checkpoint-every must be at least 0, got nan"]),
        (["run", "digits", "--checkpoint-every", "-1"], ["--checkpoint-every must be at least 0, got -1.0"]),
        (["run", "digits", "--checkpoint-every", "1e30"], ["--checkpoint-every must be at most 1000000000, got 1e+30"]),
        (["run", "digits", "--checkpoint-every", ""], ["'--checkpoint-every'", "float"]),
        (["run", "digits", "--out", ""], ["'--out'", "is empty"]),
        (["run", "digits", "--out", " "], ["'--out'", "is empty"]),
        (["run", "digits", "--out", "~nobodyatall/run"], ["'--out'", "no home folder of ~nobodyatall"]),
        (["run", "digits", "--data-dir", ""], ["'--data-dir'", "is empty"]),
        (["run", "digits", "--data-dir", "~nobodyatall"], ["'--data-dir'", "no home folder"]),
        (["run", "digits", "--sed", "1"], ["'--sed'", "'--seed'"]),
        (["resume", ""], ["'DIR'", "is empty"]),
        (["resume", "x", "--workers", "0"], ["--workers must be at least 1"]),
        (["compare", "digits", "--jobs", "-1"], ["--jobs must be at least 1, got -1", "from 1 to 4096"]),
        (["compare", "digits", "--jobs", "nan"], ["'--jobs'", "'nan'"]),
        (["compare", "digits", "--seeds", ""], ["--seeds must be comma-separated whole numbers, got ''"]),
        (["compare", "digits", "--seeds", f"0,{LONG}"], ["--seeds", "9223372036854775807", LONG]),
        (["compare", "digits", "--seeds", "1e30"], ["--seeds", "'1e30'"]),
        (["compare", "digits", "--seeds", "1" * 5000], ["--seeds", "5002 characters"]),
        (["compare", "digits", "--versions", "-1"], ["--versions must be at least 1, got -1"]),
        (["compare", "digits", "--out", ""], ["'--out'", "is empty"]),
        (["schedule", "digits", "--versions", "1000000000"], ["--versions must be at most 10000000"]),
        (["schedule", "digits", "--seeds", LONG], ["--seeds", LONG]),
        (["table", "cifar10", "--jobs", "0"], ["--jobs must be at least 1, got 0"]),
        (["table", "cifar10", "--results", ""], ["'--results'", "is empty"]),
        (["cost", "digits", "--versions", "0"], ["--versions must be at least 1, got 0"]),
        (["watch", ".", "--port", "-1"], ["--port must be between 0 and 65535, got -1"]),
        (["watch", ".", "--port", "99999"], ["--port must be between 0 and 65535, got 99999"]),
        (["watch", ".", "--port", "nan"], ["'--port'", "'nan'"]),
        (["report", ""], ["'DIR...'", "is empty"]),
        (["data", "synthesize", "m", "--num", "0"], ["--num must be at least 1, got 0"]),
        (["data", "synthesize", "m", "--steps", "-1"], ["--steps must be at least 1, got -1"]),
        (["data", "synthesize", "m", "--batch-size", "0"], ["--batch-size must be at least 1, got 0"]),
        (["certificates", "keys", "--host", "a", "--days", "9999999"], ["--days must be at most 36500, got 9999999", "from 1"]),
        (["certificates", "keys", "--host", "a", "--days", "0"], ["--days must be at least 1, got 0"]),
        (["certificates", "keys", "--host", "a", "--nodes", "-1"], ["--nodes must be at least 0, got -1", "from 0 to 10000"]),
        (["certificates", "keys", "--host", "a", "--nodes", str(BEYOND)], ["--nodes must be at most 10000"]),
        (["certificates", "keys", "--host", ""], ["--host", "is empty"]),
        (["certificates", "", "--host", "a"], ["'DIR'", "is empty"]),
        (["serve", "--insecure", "--port", "0"], ["--port must be between 1 and 65535, got 0"]),
        (["serve", "--insecure", "--host", ""], ["--host", "is empty"]),
        (["serve", "--ca", ""], ["'--ca'", "is empty"]),
        (["join", "a:1", "--client", "-1", "--insecure"], ["--client must be at least 0, got -1"]),
        (["join", "a:1", "--client", "0", "--insecure", "--port", "70000"], ["--port must be between 1 and 65535, got 70000"]),
        (["join", "a:1", "--client", "0", "--insecure", "--pause-s", "nan"], ["--pause-s must be at least 0, got nan"]),
        (["join", "a:1", "--client", "0", "--insecure", "--pause-s", "1e30"], ["--pause-s must be at most 1000000, got 1e+30"]),
        (["join", "", "--client", "0", "--insecure"], ["HOST:PORT", "''", "127.0.0.1:8000"]),
        (["join", "a:99999", "--client", "0", "--insecure"], ["HOST:PORT", "'a:99999'", "1 to 65535"]),
        (["submit", ".", "--insecure", "--versions", "0"], ["--versions must be at least 1, got 0"]),
        (["submit", ".", "--insecure", "--superlink", "nowhere"], ["--superlink", "'nowhere'", "HOST:PORT"]),
        (["submit", "", "--insecure"], ["'APP'", "is empty"]),
        (["submit", ".", "--insecure", "--out", ""], ["'--out'", "is empty"]),
        (["submit", "nowhere", "--insecure"], ["APP", "nowhere"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_an_absurd_option_is_refused_before_anything_runs(words: list[str], parts: list[str], tmp_path: Path) -> None:
    one_clear_line(fedecho(*words), *parts)
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    ("method", "where", "told"), [("fedecho", "server", "FedEcho's teachers"), ("fedac", "client", "control variates")]
)
def test_privacy_that_would_protect_less_than_it_says_is_refused(method: str, where: str, told: str, tmp_path: Path) -> None:
    words = ["--algorithm", method, "--set", "privacy.noise_multiplier=1", "--set", f"privacy.where={where}"]
    done = CliRunner().invoke(app, ["run", "digits", *words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert told in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", [(-1, 32, 32, 3), (2**40, 32, 32, 3)])
def test_an_array_whose_heading_lies_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with (tmp_path / "u.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.write(bytes(3072))
    with pytest.raises(ValueError, match=r"u\.npy: .*its header gives uint8") as caught:
        read_unlabeled(str(tmp_path / "u.npy"), None, 1, 0)
    assert "\n" not in str(caught.value)


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
    one_clear_line(fedecho("resume", "other"), "damaged or not a FedEcho record")
    assert (tmp_path / "other" / "run.jsonl").read_text() == "something else\n"


def test_a_folder_that_holds_a_model_of_somebody_elses_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"weights")
    one_clear_line(fedecho("run", "digits", "--versions", "1", "--out", "bert"), "model.safetensors does not belong to a run")
    assert [path.name for path in (tmp_path / "bert").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "bert" / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_that_holds_a_run_is_not_touched(tmp_path: Path) -> None:
    short = ["--versions", "2", "--set", "local.num_local_steps=1", "--set", "task.width=1"]
    assert fedecho("run", "digits", *short, "--out", "run").exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    one_clear_line(fedecho("run", "digits", *short, "--out", "run"), "already holds a finished run")
    one_clear_line(fedecho("compare", "digits", *short, "--out", "run"), "run holds a single run", "another --out")
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

"""The commands as a user types them."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedecho import ALGORITHMS, RECIPES, FedBuff, __version__, load, resume, simulate
from fedecho.cli import app, catalog
from fedecho.core import task as breaks
from fedecho.core.loop import Moment
from fedecho.runs import compare
from fedecho.runs import job_processes as led
from fedecho.runs import run_stats as state
from fedecho.runs.config import to_config
from fedecho.runs.record import read_record
from fedecho.runs.run import Interrupted
from fedecho.tasks import classification

SHORT = ["--set", "local.num_local_steps=1", "--set", "task.width=1", "--set", "task.num_unlabeled=20"]


def fedecho(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_list_names_everything() -> None:
    said = fedecho("list")
    for name in [*ALGORITHMS, *RECIPES, "large", "mild", *catalog.RECIPES.values()]:
        assert name in said


def test_run_writes_a_record_a_summary_and_a_model(tmp_path: Path) -> None:
    said = fedecho("run", "digits", "--versions", "6", "--seed", "4", *SHORT)
    folder = tmp_path / "runs" / "digits-fedecho-seed4"
    assert str(folder.relative_to(tmp_path)) in said
    lines = list(read_record(folder))
    header = lines[0]
    assert header["config"]["seed"] == header["config"]["task"]["seed"] == header["config"]["algorithm"]["seed"] == 4
    assert {"fedecho", "python", "torch"} <= set(header["software"])
    events = [line["event"] for line in lines]
    assert (events.count("arrival"), events.count("version"), events.count("evaluation")) == (18, 6, 3)
    summary = json.loads((folder / "summary.json").read_text())
    accuracies = [line["accuracy"] for line in lines if line["event"] == "evaluation"]
    assert summary["final_accuracy"] == accuracies[-1]
    assert summary["best_accuracy"] == max(accuracies)
    assert summary["last10_accuracy"] == pytest.approx(sum(accuracies) / 3)
    assert summary["bank_bytes"] > 0
    assert summary["peak_versions_alive"] >= 2
    load("digits", settings=["task.width=1"]).task.network(0).load_state_dict(load_file(folder / "model.safetensors"))


def test_the_saved_model_scores_what_the_summary_says(tmp_path: Path) -> None:
    experiment = load("digits", versions=10, algorithm="fedbuff")
    result = simulate(experiment, out=tmp_path / "run")
    module = experiment.task.network(0)
    module.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert experiment.task.evaluate(module.eval())["accuracy"] == result.summary.final_accuracy


def test_a_second_run_of_the_same_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        fedecho("run", "digits", "--algorithm", "fedbuff", "--versions", "1", *SHORT)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-fedbuff-seed0", "digits-fedbuff-seed0-2"]


def test_compare_ends_in_a_table_and_keeps_what_is_finished(tmp_path: Path) -> None:
    words = [
        "compare",
        "digits",
        "--algorithms",
        "fedbuff,fedecho",
        "--seeds",
        "0,1",
        "--versions",
        "3",
        "--jobs",
        "1",
        "--out",
        "both",
        *SHORT,
    ]
    first = fedecho(*words)
    rows = [line.split() for line in first.splitlines()]
    assert [row[:2] for row in rows if row and row[0] in ALGORITHMS] == [["fedbuff", "2"], ["fedecho", "2"]]
    assert "…" not in first, "nothing is cut off at 80 columns"
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "both").rglob("summary.json")}
    assert len(stamps) == 4
    assert fedecho(*words) == first
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_a_run_that_diverges_does_not_end_the_others(tmp_path: Path) -> None:
    """Huge updates: FADAS takes steps of the server's learning rate whatever their size, FedBuff steps of theirs."""
    words = ["compare", "digits", "--seeds", "0", "--versions", "6", "--set", "local.client_lr=1e8", *SHORT]
    words += ["--jobs", "1", "--json"]
    both = CliRunner().invoke(app, [*words, "--algorithms", "fedbuff,fadas", "--out", "both"])
    assert both.exit_code == 0, both.output
    told = json.loads(both.stdout)
    assert [run["algorithm"] for run in told["runs"]] == ["fadas"]
    assert list(told["diverged"]) == ["fedbuff seed 0"]
    assert "fedbuff seed 0 diverged: most of the last updates" in both.stderr
    record = tmp_path / "both" / "fedbuff-seed0" / "run.jsonl"
    stamp = record.stat().st_mtime_ns
    again = CliRunner().invoke(app, [*words[:-1], "--algorithms", "fedbuff,fadas", "--out", "both"])
    assert re.search(r"fedbuff +0 of 1\b", again.stdout), again.stdout
    assert "fedbuff seed 0 diverged: most of the last updates" in again.stderr
    assert record.stat().st_mtime_ns == stamp, "it is not tried again"
    alone = CliRunner().invoke(app, [*words, "--algorithms", "fedbuff", "--out", "alone"])
    assert alone.exit_code == 2
    assert alone.stdout == ""
    assert "none of the runs finished" in alone.stderr


@pytest.mark.slow
def test_what_a_run_has_to_say_is_said_by_its_comparison(tmp_path: Path) -> None:
    """And a name that looks like an order to the console is a name."""
    words = ["compare", "digits", "--algorithms", "fedbuff", "--seeds", "0", "--versions", "2", *SHORT, "--out", "odd[/b]"]
    command = [sys.executable, "-m", "fedecho.cli", *words, "--executor", "ray", "--workers", "1"]
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedecho[ray]'")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedbuff seed 0: starting Ray" in done.stderr
    assert "the runs are in odd[/b];" in done.stdout


def test_compare_runs_where_it_is_told(tmp_path: Path) -> None:
    """A pool inside a process of the comparison: the bytes of serial, and the record says where it ran."""
    words = ["compare", "digits", "--algorithms", "fedbuff", "--seeds", "0", "--versions", "2", *SHORT]
    fedecho(*words, "--out", "plain")
    fedecho(*words, "--out", "pooled", "--executor", "pool", "--workers", "2")
    models = [load_file(tmp_path / name / "fedbuff-seed0" / "model.safetensors") for name in ("plain", "pooled")]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    header = next(iter(read_record(tmp_path / "pooled" / "fedbuff-seed0")))
    assert header["execution"]["executor"] == "pool"
    fedecho(*words, "--out", "pooled")  # a CPU is a CPU
    record = tmp_path / "pooled" / "fedbuff-seed0" / "run.jsonl"
    on_gpu = '"execution":{"device":"a GPU","precision":"bf16","deterministic":false,'
    record.write_text(record.read_text().replace('"execution":{', on_gpu, 1))
    mixed = CliRunner().invoke(app, [*words, "--out", "pooled"])
    assert mixed.exit_code == 2
    assert "was computed on a GPU in bf16, but is to be resumed on a CPU" in mixed.stderr
    (record.parent / "summary.json").unlink()
    elsewhere = CliRunner().invoke(app, ["resume", str(record.parent), "--executor", "serial"])
    assert elsewhere.exit_code == 2
    assert "was computed on a GPU in bf16, but is to be resumed on a CPU" in elsewhere.stderr
    refused = CliRunner().invoke(app, [*words, "--out", "wrong", "--executor", "pol"])
    assert refused.exit_code == 2
    assert "pol" in refused.stderr
    assert not (tmp_path / "wrong").exists()


def test_a_file_may_start_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('recipe = "digits"\nseed = 2\n[algorithm]\nname = "fadas"\nserver_lr = 0.5\n')
    experiment = load("mine.toml")
    assert (experiment.algorithm.server_lr, experiment.algorithm.buffer_size, experiment.seed) == (0.5, 3, 2)
    (tmp_path / "large.toml").write_text('recipe = "digits"\n[algorithm]\nname = "fedbuff"\nbuffer_size = 7\n')
    sizes = [load("large.toml", algorithm=name).buffer_size for name in ("fedbuff", "ca2fl", "fedac", "fadas", "fedecho")]
    assert sizes == [7] * 5, "the file's M is every method's"
    other = load("mine.toml", algorithm="ca2fl", settings=["local.batch_size=7"])
    assert (other.algorithm.num_clients, other.local.batch_size, other.task.seed) == (20, 7, 2)


def test_a_run_that_has_diverged_ends_with_a_word() -> None:
    result = CliRunner().invoke(app, ["run", "digits", "--algorithm", "fedbuff", "--set", "local.client_lr=1e9"])
    assert result.exit_code == 2
    assert "lower local.client_lr" in result.stderr


def test_the_version() -> None:
    assert fedecho("--version").strip() == f"fedecho {__version__}"


def test_a_pool_in_an_unguarded_script_says_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text('from fedecho import load, simulate\nsimulate(load("digits", versions=1), executor="pool", workers=1)\n')
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert '`if __name__ == "__main__":`' in done.stderr
    assert done.stderr.count("Traceback") == 1


def _comparison(folder: Path) -> tuple[list[str], subprocess.Popen[str]]:
    """Four runs, two at a time, of which two have begun; in a session of its own, as a terminal's are."""
    options = ["--algorithms", "fedbuff,fadas", "--seeds", "0,1", "--jobs", "2", "--versions", "40", "--out", str(folder)]
    command = [sys.executable, "-m", "fedecho.cli", "compare", "digits", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    records = [folder / f"{name}-seed0" / "run.jsonl" for name in ("fedbuff", "fadas")]
    while not all(record.exists() and record.stat().st_size > 4000 for record in records):
        assert process.poll() is None
        time.sleep(0.01)
    return command, process


def _is_stopped_in_good_order(folder: Path) -> None:
    stopped = [run for run in folder.iterdir() if not (run / "summary.json").exists()]
    assert 1 <= len(stopped) <= 2, "no other run was begun"
    for run in stopped:
        assert list(run.glob("checkpoint-*")), f"{run.name} has nothing to go on from"


def test_ctrl_c_stops_a_comparison_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """A terminal sends it to all of its processes: those that run are then asked twice, by it and by the command."""
    command, process = _comparison(tmp_path / "both")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "run the same command again to continue" in said
    _is_stopped_in_good_order(tmp_path / "both")
    again = CliRunner().invoke(app, command[3:])
    assert again.exit_code == 0, again.stderr
    assert "starting from the beginning" not in again.stderr
    assert len(list((tmp_path / "both").rglob("summary.json"))) == 4


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_comparison_that_is_told_to_end_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Not even one that was killed: its workers see that it is gone, keep what they have and go."""
    _, process = _comparison(tmp_path / "both")
    process.send_signal(number)
    _, said = process.communicate(timeout=300)  # until the last process that has its stderr has ended
    assert process.returncode == (130 if number == signal.SIGTERM else -number)
    assert ("run the same command again to continue" in said) == (number == signal.SIGTERM)
    _is_stopped_in_good_order(tmp_path / "both")


def test_a_users_own_method_is_resumed_from_python(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Mine(FedBuff):
        """Not in the table, so a record cannot name it."""

    experiment = replace(load("digits", algorithm="fedbuff", versions=6), algorithm=Mine(buffer_size=3))
    whole = simulate(experiment)

    def stop(moment: Moment, scores: object) -> None:
        if moment.step is not None and moment.step.model.version == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match=r"fedecho\.resume\(.* in Python"):
        simulate(experiment, out=tmp_path / "run", watch=stop)
    with pytest.raises(ValueError, match="your own task or method"):
        resume(tmp_path / "run")
    with pytest.raises(ValueError, match="num_versions is 6 there and 7 here"):
        resume(tmp_path / "run", replace(experiment, num_versions=7))
    assert resume(tmp_path / "run", experiment).summary.model_sha256 == whole.summary.model_sha256


def test_a_trace_lies_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    rows = "".join(f"{client}, {client + 1}\n" for client in range(20))
    (tmp_path / "sub" / "clients.csv").write_text("\ufeffclient, runtime_s\n" + rows)
    (tmp_path / "sub" / "mine.toml").write_text('recipe = "digits"\n[runtimes]\ntrace = "clients.csv"\n')
    experiment = load("sub/mine.toml")
    assert experiment.runtimes.assign([1] * 20, 0).draw(4, 0) == 5.0


def test_so_do_a_tasks_own_files_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known set's name, and a path that is right as it stands, mean what they mean elsewhere."""
    for name in ("sub/pictures", "sub/cifar100", "sub/here.npy", "here.npy", "sub/gsm8k-train", "sub/my.jsonl", "sub/llama"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given, found in (
        ("pictures", "sub/pictures"),
        ("cifar100", "cifar100"),
        ("here.npy", "here.npy"),
        ("nowhere.npy", "nowhere.npy"),
        ("x" * 5000, "x" * 5000),
    ):
        (tmp_path / "sub" / "mine.toml").write_text(f'recipe = "cifar10"\n[task]\nunlabeled = "{given}"\n')
        assert to_config(load("sub/mine.toml"))["task"]["unlabeled"] == found
    given = 'train = "gsm8k-train"\ntest = "my.jsonl"\nmodel = "llama"\nlora_rank = 2\nlora_targets = "llama"\n'
    (tmp_path / "sub" / "mine.toml").write_text(f'recipe = "mathinstruct"\n[task]\n{given}')
    task = to_config(load("sub/mine.toml"))["task"]
    assert [task[name] for name in ("train", "test", "model", "lora_targets")] == [
        "gsm8k-train",
        "sub/my.jsonl",
        "sub/llama",
        "llama",
    ]


def test_a_run_that_is_led_keeps_its_last_evaluation_when_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = compare.PlannedRun("one", load("digits", algorithm="fedbuff", versions=2), tmp_path / "one")
    stop, real, news = threading.Event(), breaks.report_progress, []
    monkeypatch.setattr(led, "STATE_EVERY_S", 0.0)
    monkeypatch.setattr(state, "LONG_S", 0.0)

    def at(done: int, total: int) -> None:
        stop.set()
        real(done, total)

    monkeypatch.setattr(classification, "report_progress", at)
    kind, (error, _) = led.run_job(pickle.dumps(partial(compare._run_one, planned)), news.append, stop.is_set)
    assert kind == led.FAILED
    assert isinstance(error, Interrupted)
    assert "stopped at version 2 of 2" in str(error)
    assert [told.version for kind, told in news if kind == led.STATE][-1] == 2
    assert list((tmp_path / "one").glob("checkpoint-*"))

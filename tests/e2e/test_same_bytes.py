"""Same seed, same bytes: whatever the executor, the number of workers, and however often the run was killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.simulation.hand_pool import shared_memory
from typer.testing import CliRunner

from fedecho import ALGORITHMS, load, simulate
from fedecho.cli import app
from fedecho.runs.record import read_record
from fedecho.runs.summary import Summary

SETTINGS = ["--versions", "40", "--set", "task.width=4"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedecho.cli", *words]


def fedecho(*words: str) -> str:
    """What the command says, run in this process: runs that are killed have processes of their own."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stderr


def digests(folder: Path) -> tuple[str, str]:
    summary = Summary.read(folder)
    return summary.model_sha256, summary.arrivals_sha256


def without_real_time(folder: Path) -> list[bytes]:
    """Every line but the header's and the evaluations': dispatches, arrivals, versions."""
    lines = (folder / "run.jsonl").read_bytes().splitlines()
    return [line for line in lines if not line.startswith((b'{"event":"header"', b'{"event":"evaluation"'))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    fedecho("run", "digits", *SETTINGS, "--out", str(folder))
    return folder


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_pool_gives_the_bytes_of_serial(reference: Path, workers: str, tmp_path: Path) -> None:
    fedecho("run", "digits", *SETTINGS, "--executor", "pool", "--workers", workers, "--out", str(tmp_path / "run"))
    assert digests(tmp_path / "run") == digests(reference)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


def memory_of_group(leader: int) -> list[set[str]]:
    """What each process of a group maps of the pool's shared memory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if os.getpgid(int(process.name)) == leader:
                found.append(shared_memory(process.name))
    return [memory for memory in found if memory]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the memory of processes in /proc")
@pytest.mark.parametrize(
    "kill",
    [pytest.param(os.killpg, id="its process group", marks=pytest.mark.slow), pytest.param(os.kill, id="its parent alone")],
)
def test_a_killed_pool_leaves_no_shared_memory_and_its_run_resumes_to_the_same_bytes(
    kill: Callable[[int, int], None], reference: Path, tmp_path: Path
) -> None:
    folder, two = tmp_path / "run", ["--executor", "pool", "--workers", "2"]
    words = ["run", "digits", *SETTINGS, *two, "--checkpoint-every", "0", "--out", str(folder)]
    pool = subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(memory_of_group(pool.pid)) < 3 or not list(folder.glob("checkpoint-*")):  # none of it has a name
        assert pool.poll() is None
        time.sleep(0.01)
    kill(pool.pid, signal.SIGKILL)
    _, said = pool.communicate(timeout=300)  # until the last process has closed it
    assert pool.returncode == -signal.SIGKILL
    assert memory_of_group(pool.pid) == []
    assert "leaked" not in said
    assert "Traceback" not in said
    fedecho("resume", str(folder), *two)
    assert digests(folder) == digests(reference)
    assert without_real_time(folder) == without_real_time(reference)


def kill_when(process: subprocess.Popen[bytes], record: Path, size: int) -> bool:
    """SIGKILL once the record has grown past ``size`` bytes; False if the run was over before."""
    while process.poll() is None:
        if record.exists() and record.stat().st_size > size:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.005)
    return False


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_gives_the_same_bytes(reference: Path, tmp_path: Path, times: int) -> None:
    folder, dice = tmp_path / "run", random.Random(7)
    record = folder / "run.jsonl"
    whole = (reference / "run.jsonl").stat().st_size
    moments = sorted(dice.uniform(0.02, 0.95) for _ in range(times))
    words = ["run", "digits", *SETTINGS, "--checkpoint-every", "0.02", "--out", str(folder)]
    killed = 0
    for moment in moments:
        process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        killed += kill_when(process, record, int(moment * whole))
        words = ["resume", str(folder), "--checkpoint-every", "0.02"]
    assert killed == times
    fedecho("resume", str(folder))
    assert digests(folder) == digests(reference)
    assert without_real_time(folder) == without_real_time(reference)


def test_ctrl_c_leaves_a_resumable_run(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command("run", "digits", *SETTINGS, "--out", str(folder)), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (folder / "run.jsonl").exists() or (folder / "run.jsonl").stat().st_size < 5000:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"fedecho resume {folder}" in said
    assert "Traceback" not in said
    assert not (folder / "summary.json").exists()
    fedecho("resume", str(folder))
    assert digests(folder) == digests(reference)


def test_all_methods_at_one_seed_have_the_same_schedule(tmp_path: Path) -> None:
    """But for FedAvg, which waits, and FedAsync, whose every arrival is a version."""
    schedules = {}
    for name in ALGORITHMS:
        settings = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20"]
        simulate(load("digits", algorithm=name, versions=20, settings=settings), out=tmp_path / name)
        lines = [line for line in read_record(tmp_path / name) if line["event"] == "arrival"]
        schedules[name] = [(line["time"], line["client"], line["base"]) for line in lines]
    like = schedules["fedbuff"]
    assert len(like) == 60
    for name in ("ca2fl", "fedac", "fadas", "fedecho", "fedecho+"):
        assert schedules[name] == like, name
    in_time = [(time, client) for time, client, _ in like]
    assert [(time, client) for time, client, _ in schedules["fedasync"]] == in_time[:20]


def test_a_damaged_newest_checkpoint_is_passed_over(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # At every arrival, so that there are two checkpoints on a machine of any speed.
    words = ["run", "digits", *SETTINGS, "--checkpoint-every", "0", "--out", str(folder)]
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert kill_when(process, folder / "run.jsonl", (reference / "run.jsonl").stat().st_size // 2)
    newest = max(folder.glob("checkpoint-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-7] + b"damaged")
    assert newest.name in fedecho("resume", str(folder))
    assert digests(folder) == digests(reference)
    assert json.loads((folder / "summary.json").read_text())["num_versions"] == 40

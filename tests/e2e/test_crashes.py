"""What nobody foresaw is one line, exit code 1 and a log file; runs at once under default names do not meet."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from fedecho import TASKS, DigitsTask
from fedecho.cli import app
from fedecho.runs.folder import new_folder

SMALL = ["--set", "local.num_local_steps=1", "--set", "task.width=1", "--set", "task.num_unlabeled=20"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@dataclass(frozen=True, kw_only=True)
class FaultyTask(DigitsTask):
    """Digits whose examples cannot be had."""

    def batch(self, client: int, rows: Tensor, generator: Any) -> Any:
        raise KeyError("the shelf\nis empty")


@dataclass(frozen=True, kw_only=True)
class UncountedTask(DigitsTask):
    """Digits that cannot be counted."""

    def num_examples(self, client: int) -> int:
        raise AssertionError


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "faulty", FaultyTask)
    monkeypatch.setitem(TASKS, "uncounted", UncountedTask)


def crash(words: list[str], folder: Path) -> tuple[str, str]:
    """The one line on stderr, and what the log in ``folder`` says."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    line = done.stderr.strip()
    assert line.isprintable(), line
    (log,) = folder.glob("*crash-*.log")
    assert str(log) in line
    assert (log.stat().st_mode & 0o777, log.is_symlink()) == (0o600, False)
    return line, log.read_text()


def own_task(name: str) -> list[str]:
    return ["--algorithm", "fedbuff", "--set", f"task={{name='{name}', num_clients=20}}"]


def test_a_crash_in_a_run_is_logged_in_its_folder(tmp_path: Path) -> None:
    line, log = crash(["run", "digits", *own_task("faulty"), "--out", "run"], tmp_path / "run")
    assert line.startswith("unexpected KeyError: 'the shelf")
    for part in ("Traceback", "the shelf", "test_crashes.py", "torch: ", "python: ", "command: ", f"folder: {tmp_path}"):
        assert part in log
    again = CliRunner().invoke(app, ["resume", "run"])
    assert "unexpected KeyError" in again.stderr, "a log does not stand in the way"
    assert len(list((tmp_path / "run").glob("crash-*.log"))) == 2


def test_a_crash_without_a_folder_is_logged_among_temporary_files(tmp_path: Path) -> None:
    line, log = crash(["schedule", "digits", *own_task("uncounted")], tmp_path / "temporary")
    assert "unexpected AssertionError: no message" in line
    assert "in num_examples" in log


def test_what_fails_in_a_worker_is_one_line_too(tmp_path: Path) -> None:
    words = ["run", "digits", *own_task("faulty"), "--executor", "pool", "--workers", "1", "--out", "run"]
    line, log = crash(words, tmp_path / "run")
    assert "training of client" in line
    assert "in the worker:" in log
    assert "in batch" in log


def test_two_commands_at_once_without_a_folder_get_one_each(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedecho.cli", "run", "digits", "--versions", "1", *SMALL, "--quiet"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=3000) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(out.strip() for out, _ in said) == ["runs/digits-fedecho-seed0", "runs/digits-fedecho-seed0-2"]
    for out, _ in said:
        assert (tmp_path / out.strip() / "summary.json").exists()
        assert (tmp_path / out.strip()).stat().st_mode & 0o777 == 0o700


def test_a_comparison_beside_a_running_one_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedecho.cli", "compare", "digits", "--algorithms", "fedbuff", "--seeds", "0", "--quiet"]
    words += ["--jobs", "1", *SMALL]
    first = subprocess.Popen([*words, "--versions", "100000"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    record = tmp_path / "runs" / "compare-digits" / "fedbuff-seed0" / "run.jsonl"
    while not record.exists():
        assert first.poll() is None
        time.sleep(0.01)
    second = CliRunner().invoke(app, [*words[3:], "--versions", "1"])
    os.killpg(first.pid, signal.SIGINT)
    _, said = first.communicate(timeout=3000)
    assert (second.exit_code, second.stdout.strip()) == (0, "runs/compare-digits-2"), second.stderr
    assert first.returncode == 130, said
    third = CliRunner().invoke(app, [*words[3:], "--versions", "1"])
    assert "runs/compare-digits/fedbuff-seed0" in third.stderr, "free again: the command goes on there, and says what differs"


def test_a_folder_that_nothing_came_of_is_removed(tmp_path: Path) -> None:
    with new_folder(tmp_path / "runs" / "a"), new_folder(tmp_path / "runs" / "a") as second:
        assert second.name == "a-2"
        (second / "kept").write_text("")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a-2"]


def test_any_number_of_claims_at_once_are_of_different_folders(tmp_path: Path) -> None:
    start = Barrier(8)

    def claim(_: int) -> Path:
        start.wait()
        return stack.enter_context(new_folder(tmp_path / "runs" / "a"))

    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(claim, range(8)))) == 8


def test_ctrl_c_while_torch_is_imported_is_one_word(tmp_path: Path) -> None:
    (tmp_path / "slow" / "torch").mkdir(parents=True)
    (tmp_path / "slow" / "torch" / "__init__.py").write_text("import time\nprint('now', flush=True)\ntime.sleep(600)\n")
    paths = os.pathsep.join([str(tmp_path / "slow"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "fedecho", "schedule", "digits"],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (130, "interrupted\n")

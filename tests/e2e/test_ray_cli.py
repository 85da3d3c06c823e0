"""`fedecho run --executor ray` as a user has it: quiet, stopped by Ctrl-C, nothing left behind, and on again elsewhere."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedecho import load, resume, simulate
from fedecho.cli.runs import _as_before

pytest.importorskip("ray", reason="needs Ray: pip install 'fedecho[ray]'")
MARK = "FEDECHO_THIS_TEST"
OURS = ("starting Ray", "stopping after", "stopped at version", "run: version")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedecho.cli", *words]


def marked(mark: str) -> list[str]:
    """Processes that inherited the mark and are alive: Ray's are in sessions of their own."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"{MARK}={mark}".encode() in (place / "environ").read_bytes()
                and "State:\tZ" not in (place / "status").read_text()
            ):
                found.append((place / "comm").read_text().strip())
        except OSError:  # gone, or somebody else's
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_ctrl_c_leaves_a_resumable_run_and_no_process(tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", str(tmp_path)
    words = [
        "run",
        "digits",
        "--versions",
        "60",
        "--set",
        "task.width=4",
        "--executor",
        "ray",
        "--workers",
        "2",
        "--out",
        str(folder),
    ]
    process = subprocess.Popen(
        command(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: mark},
    )
    while not (folder / "run.jsonl").exists() or (folder / "run.jsonl").stat().st_size < 5000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    assert "raylet" in marked(mark)
    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert f"fedecho resume {folder}" in said
    assert all(line.startswith(OURS) for line in said.splitlines()), said
    until = time.monotonic() + 20
    while left := marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.1)
    there = resume(folder).summary
    expected = simulate(load("digits", versions=60, settings=["task.width=4"])).summary
    assert (there.model_sha256, there.arrivals_sha256) == (expected.model_sha256, expected.arrivals_sha256)


def test_a_run_goes_on_where_it_was_unless_told_otherwise() -> None:
    before = {"executor": "ray", "workers": 8, "address": "head:6379"}
    assert _as_before(before, None, None, None)["address"] == "head:6379"
    assert _as_before(before, None, 3, "auto")["address"] == "auto"
    elsewhere = _as_before(before, "pool", 2, None)
    assert (elsewhere["executor"], elsewhere["workers"], elsewhere["address"]) == ("pool", 2, None)
    assert _as_before({**before, "device": "NVIDIA H200"}, None, None, None)["device"] == "cuda"

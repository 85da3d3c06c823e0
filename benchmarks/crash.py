"""Kill runs and fill their disk: all must end with the same model as an undisturbed run.

    python -m benchmarks.crash                       200 runs, each SIGKILLed at one to three random moments and resumed until done
    python -m benchmarks.crash --num 0 --disk-full 50      a disk that is full at a random write, 50 times
    python -m benchmarks.crash --num 5 --disk-full 5       the small one that the tests run

Checkpoints are written at every message, so that most of a run's time is spent in writing them. Half of the kills come from
outside at a random time, half from inside right before a random one of the calls that change the folder: in the middle of a
write, before a sync, between the write and the rename, before an old one is removed. Every moment has an address: the same seed
draws the same ones.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least_one
from benchmarks.children import Ended, child
from benchmarks.full_disk import full_disks
from fedecho.core.randomness import below, uniform
from fedecho.runs.record import RECORD
from fedecho.runs.summary import SUMMARY, Summary

MOST_KILLS = 3


def kill(name: str, what: tuple[Any, ...]) -> None:
    """Of a write, the first half is done."""
    if name == "write":
        file, data = what
        file.write(memoryview(data)[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def digest_of(folder: Path) -> tuple[str, str, str]:
    """The model, its file and the arrivals of a finished run, which has left nothing else behind."""
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["model.safetensors", RECORD, SUMMARY], left
    summary = Summary.read(folder)
    return summary.model_sha256, sha256((folder / "model.safetensors").read_bytes()).hexdigest(), summary.arrivals_sha256


def where(folder: Path) -> str:
    """What a killed run was doing, by what it left."""
    if (folder / SUMMARY).exists():
        return "after its summary"
    if not (folder / RECORD).exists():
        return "before its first line"
    parts = [path.name for path in folder.glob("*.part")]
    return f"while it wrote {'a checkpoint' if 'checkpoint' in parts[0] else parts[0][:-5]}" if parts else "between two writes"


def killed(folder: Path, whole: Ended, seed: int, *address: int) -> Ended:
    """One attempt at the run that is killed at the moment of this address, unless it ends before."""
    if below(2, seed, "kill from outside", *address):
        return child(folder, kill_after_s=uniform(seed, "kill after", *address) * whole.seconds)
    return child(folder, happens_at=1 + below(whole.num_calls, seed, "kill at call", *address), happening=kill)


def crash(folder: Path, whole: Ended, seed: int, number: int, places: Counter[str]) -> int:
    """A run that is killed at least once and resumed until it is done; the number of kills."""
    kills, attempt, wanted = 0, 0, 1 + below(MOST_KILLS, seed, "kills", number)
    while kills < wanted:
        ended = killed(folder, whole, seed, number, attempt)
        attempt += 1
        if ended.killed:
            kills += 1
            places[where(folder)] += 1
        else:
            assert ended.code == 0, ended.said
            if kills:
                break
            shutil.rmtree(folder)  # it was faster than its killer: another moment
    last = child(folder) if not (folder / SUMMARY).exists() else child_of_finished(folder)
    assert last.code == 0, last.said
    return kills


def child_of_finished(folder: Path) -> Ended:
    """Resuming a finished run only tidies up."""
    before = (folder / SUMMARY).read_bytes()
    ended = child(folder)
    assert (folder / SUMMARY).read_bytes() == before
    return ended


def crashes(parent: Path, num: int, seed: int, whole: Ended, like: tuple[str, str, str]) -> None:
    began, places, kills, digests = time.perf_counter(), Counter[str](), 0, Counter[tuple[str, str, str]]()
    for number in range(num):
        folder = parent / f"run-{number}"
        kills += crash(folder, whole, seed, number, places)
        digests[digest_of(folder)] += 1
        shutil.rmtree(folder)
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {num}", end="", file=sys.stderr, flush=True)
    print(f"crash: {num} runs killed {kills} times and resumed, {time.perf_counter() - began:.0f} s")
    for place, count in places.most_common():
        print(f"  killed {place}: {count}")
    print(f"  {digests.total()} final models with {len(digests)} sha256: {next(iter(digests))[0]}")
    assert set(digests) == {like}, "not the bytes of the run that was not killed"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=at_least_one, default=200, help="runs that are killed")
    parser.add_argument("--disk-full", type=int, default=0, help="runs whose disk is full")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "whole"
        whole = child(folder)
        assert whole.code == 0, whole.said
        like = digest_of(folder)
        print(f"a run that nothing happens to: {whole.seconds:.2f} s, {whole.num_calls} calls that change its folder")
        if options.num:
            crashes(Path(parent), options.num, options.seed, whole, like)
        if options.disk_full:
            full_disks(Path(parent), options.disk_full, options.seed, whole, folder, digest_of)


if __name__ == "__main__":
    main()

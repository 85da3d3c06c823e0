"""What methods keep of each client in a mapped file: the same run, after a stop and after a full disk too."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fedecho import Experiment, load, resume, simulate
from fedecho.runs.run import Interrupted
from fedecho.storage.files import DiskFullError

SMALL = ["task.width=1", "local.num_local_steps=1", "task.num_unlabeled=20", "eval_every=20"]
IN_A_FILE = {
    "ca2fl": ["algorithm.memory=file", "algorithm.memory_dir={}"],
    "fedac": ["client_memory=file", "client_memory_dir={}"],
    "fedecho": ["algorithm.distiller.bank_memory=file", "algorithm.distiller.bank_dir={}"],
}


def experiment(algorithm: str, folder: Path | None = None) -> Experiment:
    chosen = [] if folder is None else [setting.format(folder) for setting in IN_A_FILE[algorithm]]
    return load("digits", algorithm=algorithm, versions=15, settings=[*SMALL, *chosen])


@pytest.mark.parametrize("algorithm", IN_A_FILE)
def test_a_mapped_run_is_the_run_in_memory_also_after_a_stop(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedecho.storage.client_memory.BLOCK_BYTES", 4096)  # so that there are several blocks
    monkeypatch.setattr("fedecho.storage.client_memory.TOUCHED_BYTES", 10_000)  # and pages are handed back all the time
    expected, moments = simulate(experiment(algorithm)).summary.model_sha256, []

    def stop(moment: Any, scores: Any) -> None:
        moments.append(moment)
        if len(moments) == 25:
            raise Interrupted("here")

    mapped = experiment(algorithm, tmp_path)
    with pytest.raises(Interrupted):
        simulate(mapped, out=tmp_path / "run", checkpoint_s=0.0, watch=stop)
    assert resume(tmp_path / "run").summary.model_sha256 == expected
    assert simulate(mapped).summary.model_sha256 == expected


@pytest.mark.parametrize("algorithm", IN_A_FILE)
def test_a_full_disk_stops_the_run_and_it_goes_on(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, taken = os.posix_fallocate, []

    def nearly_full(file: int, start: int, length: int) -> None:
        taken.append(start)
        if len(taken) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, start, length)

    mapped = experiment(algorithm, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", nearly_full)
        with pytest.raises(DiskFullError, match=r"the disk is full: .* resume with: fedecho resume"):
            simulate(mapped, out=tmp_path / "run", checkpoint_s=0.0)
    assert resume(tmp_path / "run").summary.model_sha256 == simulate(experiment(algorithm)).summary.model_sha256


@pytest.mark.parametrize("algorithm", IN_A_FILE)
def test_a_folder_that_is_none_is_said_before_anything_is_trained(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.?\w+_dir = '.*missing' is not a folder"):
        simulate(experiment(algorithm, tmp_path / "missing"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()

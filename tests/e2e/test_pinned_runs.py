"""Fixed runs and the sha256 of what they gave: a change of structure must leave every one of them alone.

    python tests/e2e/test_pinned_runs.py        runs all of them again and writes pinned_runs.json

The schedule depends on draws alone, so its digest is the same everywhere. Models and losses are float32, whose last bits depend on
torch and on the processor; they are compared where a probe of torch's arithmetic gives the pinned bytes, and skipped elsewhere.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from fedecho import ALGORITHMS, Experiment, load, resume, simulate
from fedecho.runs.record import read_record

PINS = Path(__file__).with_name("pinned_runs.json")
REAL_TIME = ("real_s", "clients_s", "server_s", "peak_bytes")


def digits(name: str) -> Experiment:
    return load("digits", algorithm=name, versions=12, settings=["task.width=4", "task.num_unlabeled=60"])


def cifar(folder: Path) -> Experiment:
    from official_files import generated, write_cifar10, write_cifar100

    write_cifar10(folder, generated(200, 10), generated(50, 10, seed=1))
    write_cifar100(folder, generated(200, 100, seed=2), generated(100, 100, seed=3))
    small = ["task.num_clients=8", "concurrency=4", "algorithm.inner.buffer_size=2", "task.width=4", "task.num_unlabeled=20"]
    return load("cifar10", versions=4, settings=[*small, "eval_every=2"])


def text(folder: Path) -> Experiment:
    from tiny_text import write_world

    write_world(folder)
    small = ["task.num_clients=6", "eval_every=3", "local.num_local_steps=2", "algorithm.distiller.batch_size=4"]
    return load("mrpc", versions=3, settings=["task.model=tiny-bert", "task.unlabeled_size=8", *small])


def digests(run: Path) -> dict[str, str]:
    """Of the schedule, the model, and the record without its header and without real time."""
    summary = json.loads((run / "summary.json").read_text())
    lines = list(read_record(run))
    schedule = [[line[key] for key in ("time", "client", "base")] for line in lines if line["event"] == "arrival"]
    told = [{key: value for key, value in line.items() if key not in REAL_TIME} for line in lines if line["event"] != "header"]
    return {"schedule": digest(schedule), "model": summary["model_sha256"], "record": digest(told)}


def digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def probe() -> str:
    """The bytes of a little of everything that the pinned runs compute."""
    generator = torch.Generator().manual_seed(0)
    images, kernels = torch.randn(16, 4, 8, 8, generator=generator), torch.randn(8, 4, 3, 3, generator=generator)
    for tensor in (images, kernels):
        tensor.requires_grad_()
    for form in (torch.contiguous_format, torch.channels_last):
        maps = torch.conv2d(images.contiguous(memory_format=form), kernels.contiguous(memory_format=form), padding=1)
        normed = torch.nn.functional.batch_norm(maps, None, None, training=True)
        logits = normed.flatten(1) @ torch.randn(512, 10, generator=generator)
        torch.nn.functional.gelu(logits).log_softmax(dim=1).square().mean().backward()
    assert images.grad is not None
    assert kernels.grad is not None
    return sha256(images.grad.numpy().tobytes() + kernels.grad.numpy().tobytes()).hexdigest()


def check(name: str, run: Path) -> None:
    pins = json.loads(PINS.read_text())
    found, pinned = digests(run), pins["runs"][name]
    assert found["schedule"] == pinned["schedule"], f"{name}: who reports when has changed"
    if pins["probe"] != probe():
        pytest.skip(f"torch {torch.__version__} computes other last bits here than where the runs were pinned")
    assert found == pinned, name


def stopped_and_resumed(experiment: Experiment, run: Path) -> None:
    """Stopped in the middle of a buffer."""

    class Stop(Exception):  # noqa: N818
        pass

    num_seen = 0

    def watch(moment: Any, scores: Any) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 8:
            raise Stop

    with pytest.raises(Stop):
        simulate(experiment, out=run, checkpoint_s=0, watch=watch)
    resume(run)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_on_digits(name: str, tmp_path: Path) -> None:
    simulate(digits(name), out=tmp_path / "run")
    check(name, tmp_path / "run")


@pytest.mark.parametrize(
    "name", [name if name in ("fedac", "fedecho") else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
def test_every_method_on_digits_in_two_processes(name: str, tmp_path: Path) -> None:
    simulate(digits(name), out=tmp_path / "run", executor="pool", workers=2)
    check(name, tmp_path / "run")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_on_digits_stopped_and_resumed(name: str, tmp_path: Path) -> None:
    stopped_and_resumed(digits(name), tmp_path / "run")
    check(name, tmp_path / "run")


@pytest.mark.parametrize("make", [cifar, text])
def test_images_and_text(make: Callable[[Path], Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDECHO_DATA", str(tmp_path / "data"))
    simulate(make(tmp_path / "data"), out=tmp_path / "run")
    check(make.__name__, tmp_path / "run")


def main() -> None:
    runs: dict[str, dict[str, str]] = {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["FEDECHO_DATA"] = str(root / "data")
        for name in ALGORITHMS:
            simulate(digits(name), out=root / name)
            runs[name] = digests(root / name)
        for make in (cifar, text):
            simulate(make(root / "data"), out=root / make.__name__)
            runs[make.__name__] = digests(root / make.__name__)
    PINS.write_text(json.dumps({"torch": torch.__version__, "probe": probe(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
    main()

"""What a run reads is read before the first client trains, stands in its record, and must be the same when the run goes on."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import generated, write_cifar10
from tiny_text import write_world
from typer.testing import CliRunner

from fedecho import DigitsTask, load, resume, simulate
from fedecho.cli import app
from fedecho.storage.files import file_sha256

MRPC = ["task.model=tiny-bert", "task.unlabeled_size=4", "eval_every=5"]
MATH = ["task.model=tiny-llama", "task.train=gsm8k-train", "task.num_unlabeled=4", "task.max_new_tokens=2", "eval_every=5"]
CIFAR = ["task.width=1", "task.num_unlabeled=5", "task.partition.alpha=100", "algorithm.distiller.batch_size=5"]
SMALL = ["task.num_clients=4", "local.num_local_steps=1", "concurrency=3", "algorithm.inner.buffer_size=1"]
RECIPES = {"mrpc": MRPC, "mathinstruct": MATH, "cifar10": CIFAR}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_world(tmp_path / "data")
    write_cifar10(folder, generated(100, 10), generated(20, 10, seed=1))
    np.save(folder / "cifar100-32.npy", generated(40, 10, seed=2)[0])
    monkeypatch.setenv("FEDECHO_DATA", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def words(recipe: str, *more: str) -> list[str]:
    settings = [word for setting in (*RECIPES[recipe], *SMALL, *more) for word in ("--set", setting)]
    return ["run", recipe, "--versions", "6", "--out", "run", *settings]


def refused(command: list[str]) -> str:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("recipe", "setting", "told"),
    [
        ("mrpc", "task.dev=nowhere.tsv", "nowhere.tsv"),
        ("mathinstruct", "task.test=nowhere.jsonl", "nowhere.jsonl"),
        ("mrpc", "task.unlabeled=nowhere.tsv", "nowhere.tsv"),
        ("cifar10", "task.unlabeled=nowhere.npy", "nowhere.npy"),
    ],
)
def test_a_file_that_is_needed_late_is_missed_at_once(data: Path, recipe: str, setting: str, told: str) -> None:
    assert told in refused(words(recipe, setting))
    assert not Path("run").exists(), "so that the same command can be given again, mended"


def test_an_answer_without_a_number_cannot_be_judged(data: Path) -> None:
    rows = [{"question": "How many ?", "answer": "#### 3"}, {"question": "Why ?", "answer": "because"}]
    Path("odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused(words("mathinstruct", "task.test=odd.jsonl"))
    assert "odd.jsonl, line 2" in said
    assert "number" in said


def other_text(path: Path) -> None:
    path.write_text(path.read_text().replace("How many", "How much").rstrip("\n") + "\n" * 3)


def other_images(path: Path) -> None:
    np.save(path, generated(40, 10, seed=3)[0])


@pytest.mark.parametrize(
    ("recipe", "name", "change", "told"),
    [
        ("mrpc", "MRPC/train.tsv", other_text, "task.train has changed"),
        ("mrpc", "MRPC/dev.tsv", other_text, "task.dev has changed"),
        ("mathinstruct", "gsm8k/test.jsonl", other_text, "task.test has changed"),
        ("cifar10", "cifar100-32.npy", other_images, "U has changed"),
    ],
)
def test_a_run_does_not_go_on_with_other_data(data: Path, recipe: str, name: str, change: Any, told: str) -> None:
    done = CliRunner().invoke(app, words(recipe))
    assert done.exit_code == 0, done.output
    Path("run/summary.json").unlink()  # as if it had been stopped
    kept = (data / name).read_bytes()
    change(data / name)
    assert told in refused(["resume", "run"])
    (data / name).write_bytes(kept)
    again = CliRunner().invoke(app, ["resume", "run"])
    assert again.exit_code == 0, again.output


def test_the_record_names_the_files_of_u(data: Path) -> None:
    assert CliRunner().invoke(app, words("cifar10")).exit_code == 0
    header = json.loads(Path("run/run.jsonl").read_text().splitlines()[0])
    assert list(header["inputs"]) == ["cifar10", "U"]
    assert header["inputs"]["U"].endswith(" of cifar100-32.npy, in place of cifar100's official files")


def test_a_method_that_needs_no_u_does_not_ask_for_it(data: Path) -> None:
    (data / "cifar100-32.npy").unlink()
    plain = [
        setting
        for setting in (*CIFAR, *SMALL, "algorithm.buffer_size=1")
        if ".distiller" not in setting and ".inner" not in setting
    ]
    settings = [word for setting in plain for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["run", "cifar10", "--algorithm", "fedbuff", "--versions", "1", "--out", "run", *settings])
    assert done.exit_code == 0, done.output


def test_a_task_of_ones_own_says_what_it_read(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(DigitsTask):
        file: Path

        def read_inputs(self, unlabeled: bool) -> dict[str, str]:
            return {"my file": f"{file_sha256(self.file)} of {self.file.name}"}

    (tmp_path / "mine.txt").write_text("one")
    experiment = replace(load("digits", algorithm="fedbuff", versions=2), task=Mine(num_clients=20, file=tmp_path / "mine.txt"))
    simulate(experiment, out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "mine.txt").write_text("two")
    with pytest.raises(ValueError, match=r"my file has changed since the run in .* began"):
        resume(tmp_path / "run", experiment)
    (tmp_path / "mine.txt").write_text("one")
    assert resume(tmp_path / "run", experiment).summary.num_versions == 2
    with pytest.raises(FileNotFoundError):
        simulate(replace(experiment, task=replace(experiment.task, file=tmp_path / "gone")), out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_network_without_width_is_refused(data: Path) -> None:
    assert "task.width must be at least 1, got 0" in refused(words("cifar10", "task.width=0"))

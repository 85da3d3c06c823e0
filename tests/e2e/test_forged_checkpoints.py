"""A checkpoint is a file that somebody may have written by hand: whatever it holds, one line says that it is not used."""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from typer.testing import CliRunner

from fedecho import Experiment, load, resume, simulate
from fedecho.cli import app
from fedecho.core.loop import Moment

Named = dict[str, Any]
Tensors = dict[str, Tensor]


def small() -> Experiment:
    return load("digits", algorithm="fedbuff", versions=3, settings=["task.width=1", "local.num_local_steps=1"])


def stopped(folder: Path) -> tuple[Path, Named, Tensors]:
    """A run that was interrupted at its first version; its newest checkpoint, open."""

    def stop(moment: Moment, scores: object) -> None:
        if moment.step is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(small(), out=folder, checkpoint_s=0.0, watch=stop)
    path = max(folder.glob("checkpoint-*"))
    for other in folder.glob("checkpoint-*"):
        if other != path:
            other.unlink()
    with safe_open(path, framework="pt") as file:
        tree = json.loads(file.metadata()["tree"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    return path, dict(tree["map"]), tensors


def sealed(path: Path, text: str, tensors: Tensors) -> None:
    """With a digest that matches, as anybody can compute it who reads the source."""
    digest = sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    path.write_bytes(save(tensors, {"format": "fedecho-checkpoint-1", "tree": text, "sha256": digest.hexdigest()}))


def one_line(folder: Path) -> str:
    """What ``fedecho resume`` has to say, and that it writes nothing."""
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    said = CliRunner().invoke(app, ["resume", str(folder), "--quiet"])
    assert said.exit_code == 2, said.output
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    *earlier, last = said.stderr.splitlines()
    assert all("is damaged" in line for line in earlier)
    return last


def server_of(named: Named) -> Named:
    return dict(named["server"]["map"])


def changed_server(named: Named, **changes: Any) -> Named:
    return {**named, "server": {"map": [[key, changes.get(key, value)] for key, value in named["server"]["map"]]}}


def other_model(named: Named, tensors: Tensors) -> Named:
    tensors["t0"] = torch.zeros(3)
    first = {"fields": {"params": {"tensor": "t0"}, "buffers": {"tensor": "t0"}}}
    return changed_server(named, models={"map": [[0, {"fields": {"version": 0, "weights": first, "correction": None}}]]})


FORGERIES: list[tuple[str, Callable[[Named, Tensors], Named]]] = [
    ("position is 'far'", lambda named, _: {**named, "position": "far"}),
    ("position is 1.5", lambda named, _: {**named, "position": 1.5}),
    ("num_moments is None", lambda named, _: {**named, "num_moments": None}),
    ("refused is True", lambda named, _: {**named, "refused": True}),
    ("real_s is 'long'", lambda named, _: {**named, "real_s": "long"}),
    ("spent is 7", lambda named, _: {**named, "spent": 7}),
    ("tally.accepted is 'many'", lambda named, _: {**named, "tally": {"map": [["accepted", "many"]]}}),
    ("server is []", lambda named, _: {**named, "server": []}),
    ("server.num_dispatched is '9'", lambda named, _: changed_server(named, num_dispatched="9")),
    ("server.models.0.weights.params is a tensor of shape (3,)", other_model),
    ("KeyError: 'position'", lambda named, _: {key: value for key, value in named.items() if key != "position"}),
    ("KeyError: 't999'", lambda named, _: {**named, "position": {"tensor": "t999"}}),
    ("unhashable type", lambda named, _: {**named, "position": {"map": [[[], 1]]}}),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Named, Tensors]:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, *stopped(folder)


@pytest.mark.parametrize(("said", "forge"), FORGERIES, ids=[said for said, _ in FORGERIES])
def test_a_part_of_another_kind_is_named(
    good: tuple[Path, Path, Named, Tensors], said: str, forge: Callable[[Named, Tensors], Named]
) -> None:
    folder, path, named, tensors = good
    copies = dict(tensors)
    sealed(path, json.dumps({"map": list(forge(named, copies).items())}), copies)
    line = one_line(folder)
    assert line.startswith(f"the checkpoint in {folder} was written by another version of fedecho (")
    assert said in line
    assert line.endswith("); start in a new folder")


@pytest.mark.parametrize("depth", [400, 100_000])
def test_a_tree_that_is_too_deep(good: tuple[Path, Path, Named, Tensors], depth: int) -> None:
    folder, path, _, tensors = good
    sealed(path, '{"map":[["fingerprint",' + "[" * depth + "]" * depth + "]]}", tensors)
    assert "checkpoint" in one_line(folder)


@pytest.mark.parametrize("text", ["7", "null", '"text"', "[]", '{"map": 3}', '{"fields": {}}', "{}"])
def test_a_tree_that_is_none(good: tuple[Path, Path, Named, Tensors], text: str) -> None:
    folder, path, _, tensors = good
    sealed(path, text, tensors)
    assert "start in a new folder" in one_line(folder)


def test_what_was_forged_resumes_when_the_good_one_is_back(good: tuple[Path, Path, Named, Tensors]) -> None:
    """So the lines above say what was forged, and nothing else."""
    folder, path, named, tensors = good
    sealed(path, json.dumps({"map": list(named.items())}), tensors)
    assert resume(folder).summary.model_sha256 == simulate(small()).summary.model_sha256


def test_a_folder_that_is_named_like_a_checkpoint_is_none(tmp_path: Path) -> None:
    path, *_ = stopped(tmp_path)
    (tmp_path / "checkpoint-9999999999.safetensors").mkdir()
    (tmp_path / "checkpoint-9999999998.safetensors").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "checkpoint-9999999997.safetensors")
    said: list[str] = []
    assert resume(tmp_path, say=said.append).summary.model_sha256 == simulate(small()).summary.model_sha256
    assert said == [
        f"checkpoint-999999999{n}.safetensors is damaged (it is not a file); trying the previous one" for n in (9, 8, 7)
    ]
    assert (tmp_path / "checkpoint-9999999999.safetensors").is_dir()
    assert not path.exists()


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors"])
def test_a_folder_in_the_place_of_a_result_is_refused_before_anything_is_trained(tmp_path: Path, name: str) -> None:
    stopped(tmp_path)
    (tmp_path / name).mkdir()
    assert f"{name} is not a regular file" in one_line(tmp_path)

"""Checkpoint files are written atomically, and damaged ones are skipped or reported."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from fedecho.storage import checkpoint
from fedecho.storage.checkpoint import (
    CheckpointError,
    decode,
    load_checkpoint,
    remove_checkpoints,
    save_checkpoint,
    write_atomically,
)

TREE = {"params": torch.arange(5.0), "counts": {"accepted": 3}, "order": [4, 1, 2]}


def loaded(folder: Path) -> tuple[Any, list[str]]:
    """The tree that loading finds, and what it said."""
    said: list[str] = []
    found = load_checkpoint(folder, said.append)
    assert found is not None
    return decode(*found), said


def two_checkpoints(folder: Path) -> Path:
    """An intact one, number 1, and a newer one to be damaged."""
    save_checkpoint(folder, 1, TREE | {"number": 1})
    return save_checkpoint(folder, 2, TREE | {"number": 2})


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("{}")
    assert load_checkpoint(tmp_path) is None


def test_the_newest_is_loaded(tmp_path: Path) -> None:
    for number in (9, 10, 100):
        save_checkpoint(tmp_path, number, {"number": number})
    tree, said = loaded(tmp_path)
    assert (tree, said) == ({"number": 100}, [])


def test_only_the_newest_few_stay(tmp_path: Path) -> None:
    for number in range(5):
        save_checkpoint(tmp_path, number, TREE)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert checkpoint.KEEP == 2
    assert kept == ["checkpoint-0000000003.safetensors", "checkpoint-0000000004.safetensors"]


def test_a_finished_run_has_its_checkpoints_removed_and_nothing_else(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"kept")
    remove_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    remove_checkpoints(tmp_path)


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


DAMAGES = {
    "torn": torn,
    "a bit flipped in the last tensor": flipped,
    "a byte flipped in the header": lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:],
    "cut short": lambda data: data[:-1],
    "cut in the header": lambda data: data[:30],
    "empty": lambda data: b"",
    "something appended": lambda data: data + b"more",
    "all zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"this is no checkpoint",
    "another format": lambda data: save({"a": torch.ones(2)}, {"format": "pt"}),
    "no metadata": lambda data: save({"a": torch.ones(2)}),
    "no checksum": lambda data: save({"a": torch.ones(2)}, {"format": checkpoint.FORMAT, "tree": "{}"}),
    "a pickle": lambda data: pickle.dumps({"number": 2}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_a_damaged_checkpoint_the_one_before_is_used_and_a_word_is_said(tmp_path: Path, damage: str) -> None:
    path = two_checkpoints(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    tree, said = loaded(tmp_path)
    assert tree["number"] == 1
    assert torch.equal(tree["params"], TREE["params"])
    assert len(said) == 1
    assert path.name in said[0]
    assert "damaged" in said[0]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = save_checkpoint(folder, 1, TREE)
    good = bytearray(path.read_bytes())
    place, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    good[place] ^= 1 << bit
    path.write_bytes(bytes(good))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        load_checkpoint(folder)


def test_two_values_swapped_are_noticed(tmp_path: Path) -> None:
    """Every tensor intact but under the other's name, in a file that safetensors itself finds well-formed."""
    first, second = torch.ones(2), torch.zeros(2)
    text, digest = '["x"]', checkpoint._digest('["x"]', {"t0": first, "t1": second})
    metadata = {"format": checkpoint.FORMAT, "tree": text, "sha256": digest}
    path = tmp_path / "checkpoint-0000000001.safetensors"
    path.write_bytes(save({"t0": first, "t1": second}, metadata))
    assert loaded(tmp_path)[0] == ["x"]
    path.write_bytes(save({"t0": second, "t1": first}, metadata))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path)


def test_with_all_damaged_it_is_said_what_to_do(tmp_path: Path) -> None:
    path = two_checkpoints(tmp_path)
    for each in tmp_path.iterdir():
        each.write_bytes(b"gone")
    said: list[str] = []
    with pytest.raises(CheckpointError, match="start a new run in another folder"):
        load_checkpoint(tmp_path, said.append)
    assert len(said) == 2
    assert path.name in said[0]


def test_a_folder_of_that_name_is_passed_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"number": 1})
    (tmp_path / "checkpoint-0000000002.safetensors").mkdir()
    tree, said = loaded(tmp_path)
    assert tree == {"number": 1}
    assert len(said) == 1


def failing_fsync(fails_at: int) -> Any:
    calls = []
    real = os.fsync

    def fsync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        real(fd)

    return fsync


def test_a_failed_write_never_has_the_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, {"number": 1})
    monkeypatch.setattr(os, "fsync", failing_fsync(1))
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, {"number": 2})
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["checkpoint-0000000001.safetensors"]
    assert loaded(tmp_path) == ({"number": 1}, [])
    monkeypatch.undo()
    save_checkpoint(tmp_path, 2, {"number": 2})
    assert loaded(tmp_path)[0] == {"number": 2}
    assert not list(tmp_path.glob("*.part")), "the next write takes the half-written file's name"


def test_a_failed_write_leaves_the_file_it_would_have_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.bin"
    write_atomically(path, b"first")
    monkeypatch.setattr(os, "fsync", failing_fsync(1))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"


def test_the_file_is_whole_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every sync, what lies under the final name is all of it or nothing; the folder is synced last."""
    seen: list[dict[str, bytes]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        seen.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "model.bin", b"all of it")
    assert seen == [{"model.bin.part": b"all of it"}, {"model.bin": b"all of it"}]


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_failed_sync_of_the_folder_closes_it_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = num_open_files()
    monkeypatch.setattr(os, "fsync", failing_fsync(2))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "model.bin", b"data")
    assert num_open_files() == open_before


class Trap:
    """Unpickling it would be noticed."""

    sprung = False

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return setattr, (Trap, "sprung", True)


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-0000000001.safetensors"
    torch.save(Trap(), path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path)
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path)
    assert not Trap.sprung
    source = Path(checkpoint.__file__).read_text()
    assert "import pickle" not in source
    assert "torch.load" not in source

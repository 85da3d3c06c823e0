"""One row per client, in memory or in a file."""

import copy
import errno
import gc
import os
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.storage.client_memory import ClientMemory, MemoryPlace
from fedecho.storage.files import DiskFullError

PLACES: tuple[MemoryPlace, ...] = ("device", "cpu", "file")
NUM_CLIENTS, SIZE = 4, 3
writes = st.lists(
    st.tuples(st.integers(0, NUM_CLIENTS - 1), st.lists(st.floats(-8, 8, width=32), min_size=SIZE, max_size=SIZE)), max_size=12
)


@given(writes)
@settings(max_examples=50, deadline=None)
def test_every_place_agrees_with_a_dict(writes: list[tuple[int, list[float]]]) -> None:
    memories = [ClientMemory(NUM_CLIENTS, torch.zeros(SIZE), place) for place in PLACES]
    model: dict[int, list[float]] = {}
    for client, values in writes:
        model.setdefault(client, values)
        model[client] = values
        for memory in memories:
            memory[client] = torch.tensor(values)
    for memory in memories:
        assert len(memory) == len(model)
        assert list(memory) == list(model)
        assert memory.num_bytes == 4 * SIZE * len(model)
        for client in range(NUM_CLIENTS):
            assert (client in memory) == (client in model)
            assert memory[client].tolist() == model.get(client, [0.0] * SIZE)


@pytest.mark.parametrize("place", PLACES)
def test_a_written_row_is_a_copy(place: MemoryPlace) -> None:
    memory, vector = ClientMemory(2, torch.zeros(3), place), torch.ones(3)
    memory[0] = vector
    vector.zero_()
    assert memory[0].tolist() == [1.0, 1.0, 1.0]
    assert memory[1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_a_tree_is_taken_up_in_any_place(source: MemoryPlace, target: MemoryPlace) -> None:
    memory = ClientMemory(5, torch.zeros(2), source)
    memory[3] = torch.tensor([1.5, -2.0])
    memory[1] = torch.tensor([0.25, 8.0])
    again = ClientMemory(5, torch.zeros(2), target).from_tree(memory.to_tree())
    assert list(again) == [3, 1]
    assert [again[client].tolist() for client in range(5)] == [memory[client].tolist() for client in range(5)]


def test_only_clients_that_were_heard_are_in_the_tree() -> None:
    memory = ClientMemory(1000, torch.zeros(2))
    memory[7] = torch.ones(2)
    tree = memory.to_tree()
    assert tree["clients"] == [7]
    assert [block.tensor().tolist() for block in tree["blocks"]] == [[[1.0, 1.0]]]


def test_a_mapped_file_has_no_name_even_while_it_is_used(tmp_path: Path) -> None:
    memory = ClientMemory(3, torch.zeros(1000), "file", str(tmp_path))
    memory[2] = torch.ones(1000)
    assert list(tmp_path.iterdir()) == []
    assert memory[2].sum() == 1000
    del memory
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_mapped_file_lies_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: asked.append(options["dir"]) or real(**options))
    ClientMemory(2, torch.zeros(3), "file", str(tmp_path))
    ClientMemory(2, torch.zeros(3), "file")
    assert asked == [str(tmp_path), None]


def test_a_mapped_file_takes_room_only_for_what_was_written(tmp_path: Path) -> None:
    """8 GB of rows, of which 4 MB are written."""
    memory = ClientMemory(2_000, torch.zeros(1_000_000), "file", str(tmp_path))
    memory[1_999] = torch.ones(1_000_000)
    assert memory[1_999][-1] == 1.0
    assert not memory[0].any()
    assert memory.num_bytes == 4_000_000
    assert memory._file is not None
    assert os.fstat(memory._file._file).st_blocks * 512 < 8_000_000
    assert os.fstat(memory._file._file).st_size > 1_000_000_000


def test_a_checkpoint_copies_little_at_a_time(tmp_path: Path) -> None:
    """Rows of 4 MB in a mapping of a gigabyte: 8 of them make up a piece."""
    memory = ClientMemory(100, torch.zeros(1_000_000), "file", str(tmp_path))
    for client in range(20):
        memory[client] = torch.full((1_000_000,), float(client))
    pieces = memory.to_tree()["blocks"]
    assert [piece.shape[0] for piece in pieces] == [8, 8, 4]
    assert [piece.tensor()[:, -1].tolist() for piece in pieces] == [
        [float(row) for row in rows] for rows in (range(8), range(8, 16), range(16, 20))
    ]


def test_a_piece_may_lie_in_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedecho.storage.client_memory.MAPPED_BLOCK_BYTES", 4096)
    monkeypatch.setattr("fedecho.storage.client_memory.BLOCK_BYTES", 3 * 2048)
    memory = ClientMemory(10, torch.zeros(512), "file", str(tmp_path))
    for client in range(7):
        memory[client] = torch.full((512,), float(client))
    assert memory._rows_per_block == 2
    assert [piece.tensor()[:, 0].tolist() for piece in memory.to_tree()["blocks"]] == [[0, 1, 2], [3, 4, 5], [6]]
    again = ClientMemory(10, torch.zeros(512)).from_tree(memory.to_tree())
    assert [again[client][0].item() for client in range(7)] == list(range(7))


def test_what_it_was_made_like_is_not_kept(tmp_path: Path) -> None:
    """The first version's weights would be, for the whole run."""
    like = torch.zeros(3)
    alive = weakref.ref(like)
    memory = ClientMemory(2, like, "file", str(tmp_path))
    del like
    gc.collect()
    assert alive() is None
    assert len(memory) == 0


def test_a_model_without_parameters_needs_no_file() -> None:
    memory = ClientMemory(2, torch.zeros(0), "file")
    memory[1] = torch.zeros(0)
    assert memory[1].shape == (0,)
    assert memory.num_bytes == 0


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"memory_dir = '.*missing' is not a folder"):
        ClientMemory(2, torch.zeros(3), "file", missing)


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'device', 'cpu' or 'file', got 'disk'"):
        ClientMemory(2, torch.zeros(3), "disk")  # type: ignore[arg-type]


def test_no_clients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_clients must be at least 1, got 0"):
        ClientMemory(0, torch.zeros(3))


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for a page, a write to mapped memory ends in SIGBUS; so the room is asked for before."""
    memory = ClientMemory(3, torch.zeros(4), "file", str(tmp_path))
    memory[1] = torch.ones(4)

    def full(file: int, start: int, length: int) -> None:
        assert (start, length) == (16, 16)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory[1] = torch.full((4,), 2.0)  # has its room
    with pytest.raises(DiskFullError, match=f"the disk is full: cannot write {tmp_path}"):
        memory[2] = torch.ones(4)
    assert list(memory) == [1]
    assert memory[1].tolist() == [2.0] * 4


row_actions = st.lists(st.tuples(st.sampled_from(["write", "drop"]), st.integers(0, 30), st.integers(-99, 99)), max_size=60)


@given(row_actions, st.sampled_from(PLACES), st.sampled_from([torch.float32, torch.float16]))
@settings(max_examples=60, deadline=None)
def test_rows_that_are_given_up_are_taken_again(
    actions: list[tuple[str, int, int]], place: MemoryPlace, dtype: torch.dtype
) -> None:
    """Against a dict; the rows in use never outnumber the clients there were at once."""
    memory, model, most = ClientMemory(31, torch.zeros(3), place, dtype=dtype), {}, 0
    for action, client, value in actions:
        if action == "write":
            memory[client] = torch.full((3,), float(value))
            model[client] = [float(value)] * 3
        elif client in model:
            del memory[client]
            del model[client]
        most = max(most, len(model))
        assert list(memory) == list(model)
        assert {client: memory[client].tolist() for client in memory} == model
        assert memory.num_bytes == len(model) * 3 * dtype.itemsize
    assert sum(block.shape[0] for block in memory.to_tree()["blocks"]) <= most
    again = copy.deepcopy(memory)
    assert {client: again[client].tolist() for client in again} == model


def test_pages_of_a_mapped_file_are_handed_back(tmp_path: Path) -> None:
    """400 MB of rows are written and read, and at no time is much of them in memory."""
    memory, row = ClientMemory(100, torch.zeros(1_000_000), "file", str(tmp_path)), torch.ones(1_000_000)
    before, most = resident_mb(), 0.0
    for client in range(100):
        memory[client] = row * client
        most = max(most, resident_mb() - before)
    assert [int(memory[client][-1]) for client in range(0, 100, 9)] == list(range(0, 100, 9))
    assert most < 200


def resident_mb() -> float:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmRSS"].split()[0]) / 1024

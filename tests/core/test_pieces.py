"""A file written piece by piece against safetensors' own reader, and long lists as numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from fedecho.storage.checkpoint import DTYPES, decode, encode, load_checkpoint, pieces_of, save_checkpoint, write_atomically
from fedecho.storage.client_memory import ClientMemory, MemoryPlace


def tensors() -> dict[str, Tensor]:
    found = {f"each{place}": torch.arange(5).to(dtype) for place, dtype in enumerate(DTYPES)}
    return found | {"none": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "turned": torch.arange(6.0).view(2, 3).T}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    written = tensors()
    write_atomically(tmp_path / "file", pieces_of(written, {"of": "us"}))
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"of": "us"}
        assert set(file.keys()) == set(written)
        for name, tensor in written.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found, tensor)


def test_a_tensor_it_has_no_name_for_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot hold a tensor of torch.complex64"):
        list(pieces_of({"x": torch.zeros(1, dtype=torch.complex64)}, {}))


def long(kind: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    whole = rng.integers(-(2**63), 2**63 - 1, 1000, endpoint=True).tolist()
    plain = rng.permuted(np.concatenate([[np.inf, -0.0, 5e-324], rng.normal(size=997)])).tolist()
    return {"whole": whole, "floats": plain, "pairs": dict(zip(whole, range(1000), strict=True))}[kind]


@pytest.mark.parametrize("kind", ["whole", "floats", "pairs"])
@given(seed=st.integers(0, 2**40))
@settings(max_examples=20, deadline=None)
def test_long_lists_come_back_as_they_were(kind: str, seed: int) -> None:
    value, held = long(kind, seed), {}
    again = decode(json.loads(json.dumps(encode(value, held))), held)
    assert (again, list(map(repr, again))) == (value, list(map(repr, value)))
    assert len(held) == (2 if kind == "pairs" else 1)


@pytest.mark.parametrize("odd", [None, True, 2**63, 0.5, "x"])
def test_a_long_list_that_is_not_all_numbers_stays_a_list(odd: Any) -> None:
    value, held = [*range(1000), odd], {}
    again = decode(json.loads(json.dumps(encode(value, held))), held)
    assert (again, type(again[-1]), held) == (value, type(odd), {})


def test_a_million_idle_clients_take_a_short_header(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"idle": list(range(1_000_000)), "seen": dict.fromkeys(range(5000), 7)})
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert length < 1000
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert decode(*found)["idle"] == list(range(1_000_000))


@pytest.mark.parametrize("place", ["cpu", "file"])
def test_rows_go_through_a_checkpoint_block_by_block(
    place: MemoryPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedecho.storage.client_memory.BLOCK_BYTES", 4096)
    width = 512
    memory = ClientMemory(500, torch.zeros(width), place)
    for client in range(0, 400, 2):
        memory[client] = torch.full((width,), float(client))
    for client in (4, 8, 100):
        del memory[client]
    memory[77] = torch.full((width,), 0.5)
    save_checkpoint(tmp_path, 1, {"rows": memory})
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert len(found[1]) > 10, "one tensor for each block"
    again = decode(*found, {"rows": ClientMemory(500, torch.zeros(width), place)})["rows"]
    assert list(again) == list(memory)
    assert all(torch.equal(again[client], memory[client]) for client in range(500))

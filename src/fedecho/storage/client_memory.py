"""One flat vector per client that has reported: in memory, on another device or in a memory-mapped file."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from math import gcd, prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedecho.storage.checkpoint import Later
from fedecho.storage.files import disk_full_at

MAPPED_BLOCK_BYTES = 2**30
"""A block costs an open file and no room, so blocks are large: at the usual limit of 1,024 open files, a terabyte."""

TOUCHED_BYTES = 64 * 2**20
"""After so many bytes read or written the pages are handed back: they stay in the system's cache, which it frees as it needs."""


def check_folder(folder: str | None, setting: str) -> None:
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"{setting} = {folder!r} is not a folder")


class MappedFile:
    """Unlinked at once, so it is gone with the process; sparse, so it takes room only for rows that were reserved."""

    def __init__(self, folder: str | None, row_bytes: int, setting: str) -> None:
        check_folder(folder, setting)
        whole_pages = mmap.ALLOCATIONGRANULARITY // gcd(mmap.ALLOCATIONGRANULARITY, row_bytes)
        self.rows_per_block = -(-max(1, MAPPED_BLOCK_BYTES // row_bytes) // whole_pages) * whole_pages
        self._row_bytes = row_bytes
        self._folder = Path(folder or tempfile.gettempdir())
        with tempfile.TemporaryFile(prefix="fedecho-", dir=folder) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._maps: list[mmap.mmap] = []
        self._touched = 0

    def new_block(self) -> mmap.mmap:
        """The next rows as writable memory. Those that were not reserved must not be written."""
        size = self.rows_per_block * self._row_bytes
        start = len(self._maps) * size
        with disk_full_at(self._folder):
            os.ftruncate(self._file, start + size)
            self._maps.append(mmap.mmap(self._file, size, offset=start))
        self._maps[-1].madvise(mmap.MADV_RANDOM)  # else the system brings in megabytes around every row
        return self._maps[-1]

    def reserve(self, row: int) -> None:
        """Takes the room of a row: where there is none, a write to mapped memory would kill the process."""
        with disk_full_at(self._folder):
            os.posix_fallocate(self._file, row * self._row_bytes, self._row_bytes)

    def touched(self, num_bytes: int) -> None:
        self._touched += num_bytes
        if self._touched >= TOUCHED_BYTES:
            self._touched = 0
            for block in self._maps:
                block.madvise(mmap.MADV_DONTNEED)


Place = Literal["device", "cpu", "file"]
PLACES = ("device", "cpu", "file")
BLOCK_BYTES = 32 * 2**20
"""In memory rows lie in blocks of about this size, so they grow without being copied; a checkpoint copies so much at a time."""


def check_place(place: Place | None, folder: str | None, place_name: str, folder_name: str) -> None:
    """Whether the folder is there is asked where it is used, which may be another machine."""
    if folder is not None and place != "file":
        raise ValueError(f"{folder_name} is the folder of {place_name} = 'file', which is not set")


class ClientMemory:
    """Rows that are zero until written. Only clients that were heard take room, and part in a checkpoint.

    ``device`` keeps rows beside the model, ``cpu`` in main memory, ``file`` in a mapped temporary file that the system
    pages as it sees fit and that is gone with the process (a checkpoint holds what a resumed run needs).
    """

    def __init__(
        self,
        num_clients: int,
        like: Tensor,
        place: Place = "device",
        folder: str | None = None,
        dtype: torch.dtype = torch.float32,
        setting: str = "memory_dir",
    ) -> None:
        """``like`` says how long a row is and where the model lies; ``setting`` is what the user calls ``folder``."""
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, got {num_clients}")
        if place not in PLACES:
            raise ValueError(f"memory must be 'device', 'cpu' or 'file', got {place!r}")
        self._num_clients, self._size, self._home, self._dtype = num_clients, like.numel(), like.device, dtype
        self.row_bytes = self._size * dtype.itemsize
        self._slots: dict[int, int] = {}
        """Which row is whose, in the order clients were first heard."""
        self._free: list[int] = []
        self._device = self._home if place == "device" else torch.device("cpu")
        self._file = MappedFile(folder, self.row_bytes, setting) if place == "file" and self.row_bytes else None
        self._rows_per_piece = max(1, BLOCK_BYTES // max(self.row_bytes, 1))
        self._rows_per_block = self._file.rows_per_block if self._file else self._rows_per_piece
        self._blocks: list[Tensor] = []

    def __len__(self) -> int:
        """How many clients were heard."""
        return len(self._slots)

    def __contains__(self, client: int) -> bool:
        return client in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __getitem__(self, client: int) -> Tensor:
        """The client's row beside the model: a view where it already is there, else a copy."""
        slot = self._slots.get(client)
        if slot is None:
            return torch.zeros(self._size, dtype=self._dtype, device=self._home)
        return self._row(slot).to(self._home)

    def __setitem__(self, client: int, vector: Tensor) -> None:
        slot = self._slots.get(client)
        if slot is None:
            slot = self._free[-1] if self._free else len(self._slots)
            self._make_room(slot)
            self._slots[client] = slot
            del self._free[-1:]
        self._row(slot).copy_(vector)

    def __delitem__(self, client: int) -> None:
        """The client is no longer heard of; its row is for the next one."""
        self._free.append(self._slots.pop(client))

    def _row(self, slot: int) -> Tensor:
        if self._file is not None:
            self._file.touched(self.row_bytes)
        return self._blocks[slot // self._rows_per_block][slot % self._rows_per_block]

    def _make_room(self, slot: int) -> None:
        if slot // self._rows_per_block == len(self._blocks):
            self._blocks.append(self._new_block())
        if self._file is not None:
            self._file.reserve(slot)

    def _new_block(self) -> Tensor:
        shape = (self._rows_per_block, self._size)
        if self._file is None:
            return torch.empty(shape, dtype=self._dtype, device=self._device)  # of which nothing is read before it is written
        return torch.frombuffer(self._file.new_block(), dtype=self._dtype, count=prod(shape)).view(shape)

    @property
    def num_bytes(self) -> int:
        return len(self._slots) * self.row_bytes

    def to_tree(self) -> dict[str, Any]:
        """In pieces, each of which a checkpoint copies when it comes to it."""
        used = max(self._slots.values(), default=-1) + 1
        starts = range(0, used, self._rows_per_piece)
        blocks = [_Piece(self, start, min(start + self._rows_per_piece, used)) for start in starts]
        return {"clients": list(self._slots), "slots": list(self._slots.values()), "blocks": blocks}

    def from_tree(self, tree: dict[str, Any]) -> "ClientMemory":
        if "rows" in tree:  # of a checkpoint from before there were blocks
            for client, row in zip(tree["clients"], tree["rows"], strict=True):
                self[client] = row
            return self
        blocks = [block.tensor() if isinstance(block, _Piece) else block for block in tree["blocks"]]
        per_block = len(blocks[0]) if blocks else 1
        for client, slot in zip(tree["clients"], tree["slots"], strict=True):
            self[client] = blocks[slot // per_block][slot % per_block]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientMemory":
        """In main memory where the rows are in a file, which nobody can copy."""
        place: Place = "cpu" if self._file is not None else "device" if self._device == self._home else "cpu"
        like = torch.empty(self._size, dtype=self._dtype, device=self._home)
        return ClientMemory(self._num_clients, like, place, dtype=self._dtype).from_tree(self.to_tree())


class _Piece(Later):
    """Some rows, copied off their place when a checkpoint comes to them."""

    def __init__(self, memory: ClientMemory, start: int, end: int) -> None:
        self._memory, self._slots = memory, range(start, end)
        self.dtype = memory._dtype
        self.shape = (end - start, memory._size)

    def tensor(self) -> Tensor:
        rows = torch.empty(self.shape, dtype=self.dtype)
        slot, end, per_block = self._slots.start, self._slots.stop, self._memory._rows_per_block
        while slot < end:  # it may begin in one block and end in the next
            block, first = divmod(slot, per_block)
            num = min(end - slot, per_block - first)
            done = slot - self._slots.start
            rows[done : done + num].copy_(self._memory._blocks[block][first : first + num])
            slot += num
        if self._memory._file is not None:
            self._memory._file.touched(rows.nbytes)
        return rows

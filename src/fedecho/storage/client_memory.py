"""``ClientMemory``: one flat vector per client, on the model's device, in main memory or in a memory-mapped file."""

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

from fedecho.storage.checkpoint import LazyTensor
from fedecho.storage.files import disk_full_at

MAPPED_BLOCK_BYTES = 2**30
"""The size of a mapped block. Each holds a file handle but takes no space until written: 1,024 of them map a terabyte."""

TOUCHED_BYTES = 64 * 2**20
"""Pages are released after this many bytes read or written. They stay in the page cache, which the system frees as needed."""


def check_folder(folder: str | None, setting: str) -> None:
    """Raise if ``folder``, the value of ``setting``, is given but does not exist."""
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"{setting} = {folder!r} is not a folder")


class MappedFile:
    """A memory-mapped temporary file. It is unlinked, so it ends with the process, and sparse: only reserved rows take space."""

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
        """Return the next rows as writable memory. Rows must be reserved before they are written."""
        size = self.rows_per_block * self._row_bytes
        start = len(self._maps) * size
        with disk_full_at(self._folder):
            os.ftruncate(self._file, start + size)
            self._maps.append(mmap.mmap(self._file, size, offset=start))
        self._maps[-1].madvise(mmap.MADV_RANDOM)  # otherwise the system reads megabytes ahead of every row
        return self._maps[-1]

    def reserve(self, row: int) -> None:
        """Allocate the disk space of a row. Without it, a write to mapped memory on a full disk would kill the process."""
        with disk_full_at(self._folder):
            os.posix_fallocate(self._file, row * self._row_bytes, self._row_bytes)

    def touched(self, num_bytes: int) -> None:
        """Count bytes that were read or written, and release mapped pages every ``TOUCHED_BYTES``."""
        self._touched += num_bytes
        if self._touched >= TOUCHED_BYTES:
            self._touched = 0
            for block in self._maps:
                block.madvise(mmap.MADV_DONTNEED)


MemoryPlace = Literal["device", "cpu", "file"]
PLACES = ("device", "cpu", "file")
BLOCK_BYTES = 32 * 2**20
"""The size of a block of rows in main memory, which therefore grows without copying, and of a checkpoint's copies."""


def check_memory_place(place: MemoryPlace | None, folder: str | None, place_name: str, folder_name: str) -> None:
    """Raise if a folder is given without a file. The folder itself is checked on the machine that uses it."""
    if folder is not None and place != "file":
        raise ValueError(f"{folder_name} is only used with {place_name} = 'file': set both, or leave {folder_name} out")


class ClientMemory:
    """One row per client, zero until written. Only clients that were written take space, in memory and in checkpoints.

    ``device`` keeps rows on the model's device, ``cpu`` in main memory and ``file`` in a memory-mapped temporary file. That file
    ends with the process; checkpoints contain the rows that a resumed run needs.
    """

    def __init__(
        self,
        num_clients: int,
        like: Tensor,
        place: MemoryPlace = "device",
        folder: str | None = None,
        dtype: torch.dtype = torch.float32,
        setting: str = "memory_dir",
    ) -> None:
        """Create an empty memory. ``like`` gives the row length and the model's device, ``setting`` the setting of ``folder``."""
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, got {num_clients}")
        if place not in PLACES:
            raise ValueError(f"memory must be 'device', 'cpu' or 'file', got {place!r}")
        self._num_clients, self._size, self._home, self._dtype = num_clients, like.numel(), like.device, dtype
        self.row_bytes = self._size * dtype.itemsize
        self._slots: dict[int, int] = {}
        """The row of each client, in the order of their first writes."""
        self._free: list[int] = []
        self._device = self._home if place == "device" else torch.device("cpu")
        self._file = MappedFile(folder, self.row_bytes, setting) if place == "file" and self.row_bytes else None
        self._rows_per_piece = max(1, BLOCK_BYTES // max(self.row_bytes, 1))
        self._rows_per_block = self._file.rows_per_block if self._file else self._rows_per_piece
        self._blocks: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of clients with a row."""
        return len(self._slots)

    def __contains__(self, client: int) -> bool:
        return client in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __getitem__(self, client: int) -> Tensor:
        """Return the client's row on the model's device: a view if it is stored there, otherwise a copy."""
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
        """Remove a client. Its row is reused for the next one."""
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
            return torch.empty(shape, dtype=self._dtype, device=self._device)  # rows are written before they are read
        return torch.frombuffer(self._file.new_block(), dtype=self._dtype, count=prod(shape)).view(shape)

    @property
    def num_bytes(self) -> int:
        return len(self._slots) * self.row_bytes

    def to_tree(self) -> dict[str, Any]:
        """Encode the rows as lazy blocks, each of which is copied when a checkpoint writes it."""
        used = max(self._slots.values(), default=-1) + 1
        starts = range(0, used, self._rows_per_piece)
        blocks = [_Rows(self, start, min(start + self._rows_per_piece, used)) for start in starts]
        return {"clients": list(self._slots), "slots": list(self._slots.values()), "blocks": blocks}

    def from_tree(self, tree: dict[str, Any]) -> "ClientMemory":
        blocks = [block.tensor() if isinstance(block, _Rows) else block for block in tree["blocks"]]
        per_block = len(blocks[0]) if blocks else 1
        for client, slot in zip(tree["clients"], tree["slots"], strict=True):
            self[client] = blocks[slot // per_block][slot % per_block]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientMemory":
        """Copy all rows. File-backed rows are copied to main memory."""
        place: MemoryPlace = "cpu" if self._file is not None else "device" if self._device == self._home else "cpu"
        like = torch.empty(self._size, dtype=self._dtype, device=self._home)
        return ClientMemory(self._num_clients, like, place, dtype=self._dtype).from_tree(self.to_tree())


class _Rows(LazyTensor):
    """A range of rows that is copied when a checkpoint writes it."""

    def __init__(self, memory: ClientMemory, start: int, end: int) -> None:
        self._memory, self._slots = memory, range(start, end)
        self.dtype = memory._dtype
        self.shape = (end - start, memory._size)

    def tensor(self) -> Tensor:
        rows = torch.empty(self.shape, dtype=self.dtype)
        slot, end, per_block = self._slots.start, self._slots.stop, self._memory._rows_per_block
        while slot < end:  # the range may span several blocks
            block, first = divmod(slot, per_block)
            num = min(end - slot, per_block - first)
            done = slot - self._slots.start
            rows[done : done + num].copy_(self._memory._blocks[block][first : first + num])
            slot += num
        if self._memory._file is not None:
            self._memory._file.touched(rows.nbytes)
        return rows

"""A temporary file of rows, mapped block by block: as large as the disk, of which little is in memory at a time."""

import mmap
import os
import tempfile
import weakref
from math import gcd
from pathlib import Path

from fedecho.core.disk import disk_full_at

BLOCK_BYTES = 2**30
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
        self.rows_per_block = -(-max(1, BLOCK_BYTES // row_bytes) // whole_pages) * whole_pages
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

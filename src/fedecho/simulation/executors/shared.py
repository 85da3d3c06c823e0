"""Float vectors in memory that several processes see."""

import os
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedecho.core.disk import disk_full_at


class _Memory(SharedMemory):
    """Unmapped with its last view, whoever goes first."""

    def close(self) -> None:
        with suppress(BufferError):  # a view is still alive; the mapping goes with it
            super().close()


class Segment:
    """A named piece of shared memory as one float32 vector. The process that made it removes it."""

    def __init__(self, size: int, name: str | None = None) -> None:
        self._owner = name is None
        self._memory = _Memory(name=name, create=self._owner, size=max(4 * size, 4))
        self.name = self._memory.name
        if self._owner:
            self._take_room()
        # Through numpy, which holds on to the memory while a view of it lives; torch.frombuffer does not.
        self.vector: Tensor = torch.from_numpy(np.frombuffer(cast("memoryview", self._memory.buf), np.float32, size))

    def _take_room(self) -> None:
        """Now, because a write to memory that is not there kills the process; a container often has only 64 MB of it."""
        try:
            with disk_full_at(Path("/dev/shm")):  # noqa: S108 (named in an error)
                os.posix_fallocate(vars(self._memory)["_fd"], 0, self._memory.size)
        except OSError:
            self._memory.close()
            self._memory.unlink()
            raise

    def close(self) -> None:
        del self.vector
        self._memory.close()
        if self._owner:
            self._memory.unlink()


class Segments:
    """Segments of one size, used again and again: making one costs page faults on every page."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._all: list[Segment] = []
        self._free: list[Segment] = []

    def take(self) -> Segment:
        if self._free:
            return self._free.pop()
        self._all.append(Segment(self._size))
        return self._all[-1]

    def give_back(self, segment: Segment) -> None:
        self._free.append(segment)

    def close(self) -> None:
        while self._all:
            self._all.pop().close()
        self._free.clear()

"""Float vectors in memory that several processes share."""

import mmap
import os
import socket
import sys
import tempfile
import weakref
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedecho.storage.files import disk_full_at

FOLDER = Path("/dev/shm" if sys.platform == "linux" else tempfile.gettempdir())  # noqa: S108 (the files have no names)


class Segment:
    """A block of shared memory, viewed as one float32 vector."""

    def __init__(self, size: int) -> None:
        with disk_full_at(FOLDER), tempfile.TemporaryFile(dir=FOLDER) as file:
            # Allocate now: writing to a page that cannot be allocated kills the process, and containers often have only 64 MB.
            _allocate(file.fileno(), _num_bytes(size))
            self.number = os.dup(file.fileno())
            """The file descriptor, which also identifies the segment in orders."""
        self._release = weakref.finalize(self, os.close, self.number)
        self.vector = _mapped(self.number, size)

    def send(self, pipe: Connection) -> None:
        """Send the open file; the other end maps it with ``receive_segment``."""
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            socket.send_fds(stream, [b"f"], [self.number])

    def close(self) -> None:
        """Release this reference; the memory is freed when no process has a view of it any more."""
        del self.vector
        self._release()


def receive_segment(pipe: Connection, size: int) -> Tensor:
    """Map the next segment that the other end of the pipe sends."""
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        byte, files, *_ = socket.recv_fds(stream, 1, 1)
    if not byte:
        raise EOFError("the pipe was closed")
    if not files:
        raise OSError("a shared-memory segment did not arrive: check the limit on open files (ulimit -n)")
    try:
        return _mapped(files[0], size)
    finally:
        os.close(files[0])


def _num_bytes(size: int) -> int:
    return max(4 * size, 4)


def _allocate(file: int, num_bytes: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.ftruncate(file, num_bytes)


def _mapped(file: int, size: int) -> Tensor:
    """Map the file through numpy, which keeps the mapping alive as long as any view; ``torch.frombuffer`` does not."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(file, _num_bytes(size)), np.float32, size))


class Segments:
    """A free list of segments of one size. Reuse avoids a page fault on every page of a new segment."""

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

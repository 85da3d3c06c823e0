"""Shared memory when there is too little of it."""

import errno
import os
from pathlib import Path

import pytest

from fedecho.executors.shared_memory import Segment
from fedecho.storage.files import DiskFullError


def test_too_little_shared_memory_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with 64 MB of it would else end in SIGBUS at the first write."""

    def full(file: int, start: int, length: int) -> None:
        assert length >= 4 * 1000
        taken.append(Path(f"/proc/self/fd/{file}").readlink())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    taken: list[Path] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match="cannot write /dev/shm"):
        Segment(1000)
    assert taken[0].parent.name == "shm"
    assert not taken[0].exists()
    monkeypatch.undo()
    segment = Segment(1000)
    assert segment.vector.shape == (1000,)
    segment.close()

"""One flat vector per client: in memory, on another device, or in a mapped file."""

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedecho.core.disk import disk_full_at

Place = Literal["device", "cpu", "file"]


class ClientMemory:
    """Rows that are zero until written. Only the clients that were heard take part in a checkpoint.

    ``device`` keeps rows beside the model, ``cpu`` in main memory, ``file`` in a mapped temporary file that the system
    pages as it sees fit and that is gone with the process (a checkpoint holds what a resumed run needs).
    """

    def __init__(self, num_clients: int, like: Tensor, place: Place = "device", folder: str | None = None) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, got {num_clients}")
        self._like = like
        self._seen: dict[int, None] = {}
        shape = (num_clients, like.numel())
        self._room: _Room | None = None
        if place == "file":
            self._room, rows = _mapped(shape, folder)
            self._rows = torch.from_numpy(rows)
        elif place in ("device", "cpu"):
            self._rows = torch.zeros(shape, dtype=torch.float32, device=like.device if place == "device" else "cpu")
        else:
            raise ValueError(f"memory must be 'device', 'cpu' or 'file', got {place!r}")

    def __len__(self) -> int:
        """How many clients were heard."""
        return len(self._seen)

    def __contains__(self, client: int) -> bool:
        return client in self._seen

    def __iter__(self) -> Iterator[int]:
        return iter(self._seen)

    def __getitem__(self, client: int) -> Tensor:
        """The client's row beside the model: a view where it already is there, else a copy."""
        return self._rows[client].to(self._like.device)

    def __setitem__(self, client: int, vector: Tensor) -> None:
        if self._room is not None and client not in self._seen:
            self._room.reserve(client)
        self._rows[client].copy_(vector)
        self._seen[client] = None

    @property
    def num_bytes(self) -> int:
        return len(self._seen) * self._rows.shape[1] * 4

    def to_tree(self) -> dict[str, Any]:
        clients = list(self._seen)
        return {"clients": clients, "rows": [self._rows[client] for client in clients]}

    def from_tree(self, tree: dict[str, Any]) -> "ClientMemory":
        for client, row in zip(tree["clients"], tree["rows"], strict=True):
            self[client] = row
        return self


class _Room:
    """Takes the room of a row before it is written: where there is none, a write to mapped memory would kill the process."""

    def __init__(self, file: int, row_bytes: int, folder: Path) -> None:
        self._file, self._row_bytes, self._folder = file, row_bytes, folder
        weakref.finalize(self, os.close, file)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Room":
        return self

    def reserve(self, row: int) -> None:
        with disk_full_at(self._folder):
            os.posix_fallocate(self._file, row * self._row_bytes, self._row_bytes)


def _mapped(shape: tuple[int, int], folder: str | None) -> tuple[_Room | None, np.ndarray[Any, np.dtype[np.float32]]]:
    """A sparse temporary file, unlinked at once: it takes room only for rows that were written."""
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"memory_dir {folder!r} is not a folder")
    if shape[1] == 0:
        return None, np.zeros(shape, np.float32)
    with tempfile.TemporaryFile(prefix="fedecho-", dir=folder) as file:
        room = _Room(os.dup(file.fileno()), 4 * shape[1], Path(folder or tempfile.gettempdir()))
        return room, np.memmap(file, np.float32, "w+", shape=shape)

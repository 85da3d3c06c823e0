"""SHA-256 of what a run reads, so that one that goes on can be told if it changed."""

from collections.abc import Iterable
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedecho.core.user_files import opened


def file_sha256(path: Path) -> str:
    """Once for each state of a file: weights are gigabytes."""
    return _digest(path, path.stat().st_mtime_ns)


@cache
def _digest(path: Path, changed_ns: int) -> str:
    with opened(path) as file:
        return file_digest(file, "sha256").hexdigest()


def arrays_sha256(arrays: Iterable[NDArray[Any] | None]) -> str:
    whole = sha256()
    for array in arrays:
        if array is not None:
            whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


@cache
def source_sha256() -> str:
    """Of this package's own source files, with their names: a version number does not tell of an edit."""
    package, whole = Path(__file__).parents[1], sha256()
    for path in sorted(package.rglob("*.py")):
        with path.open("rb") as file:
            whole.update(f"{path.relative_to(package).as_posix()} {file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()

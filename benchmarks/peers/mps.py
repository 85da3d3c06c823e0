"""NVIDIA's MPS server for several processes on one GPU: their kernels then run side by side and not in slices of time."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
QUIT = b"quit -t 10\n"
"""At once, or after ten seconds whoever is still served."""


class NoMpsError(Exception):
    """The server cannot be had."""


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """What the processes need in their environment to be served; the server ends with the block."""
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:  # it writes on while it ends
        served = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        _control(folder, served, "-d")
        try:
            yield served
        finally:
            _control(folder, served, given=QUIT)


def _control(folder: str, served: dict[str, str], *words: str, given: bytes = b"") -> None:
    """What it says goes to a file: a server keeps what it was given to write to."""
    path = Path(folder, "said")
    with path.open("wb") as said:
        try:
            done = subprocess.run(
                [CONTROL, *words], env=os.environ | served, input=given, stdout=said, stderr=said, check=False
            )
        except FileNotFoundError:
            raise NoMpsError(f"there is no {CONTROL} here") from None
    if words and done.returncode:
        raise NoMpsError(f"{CONTROL} {' '.join(words)} failed: {path.read_text(errors='replace').strip()[:200]}")

"""NVIDIA's MPS server for several processes on one GPU: their kernels then run side by side and not in slices of time."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import DEVNULL

CONTROL = "nvidia-cuda-mps-control"
QUIT = b"quit -t 10\n"
"""At once, or after ten seconds whoever is still served."""


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """What the processes need in their environment to be served; the server ends with the block."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        served = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([CONTROL, "-d"], env=os.environ | served, check=True, stdout=DEVNULL, stderr=DEVNULL)
        try:
            yield served
        finally:
            subprocess.run([CONTROL], env=os.environ | served, input=QUIT, check=False, stdout=DEVNULL, stderr=DEVNULL)


def has_mps() -> bool:
    return shutil.which(CONTROL) is not None

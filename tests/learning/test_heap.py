"""A training process keeps freed pages mapped, measured by page faults."""

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource, sys, torch
from fedecho.learning.trainer import keep_heap
torch.set_num_threads(1)
libc = ctypes.CDLL(None)
libc.mallopt(-1, 131072), libc.mallopt(-3, 131072)  # where glibc begins; what it makes of it later is luck
kept = keep_heap() if sys.argv[1] == "kept" else None
def step():
    blocks = [torch.empty(150_000).fill_(1.0) for _ in range(20)]
    del blocks
for _ in range(20):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> tuple[str, int]:
    found = subprocess.run(
        [sys.executable, "-c", STEPS, how], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    kept, count = found.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_freed_memory_is_not_fetched_again() -> None:
    kept, count = faults("kept")
    assert kept == "True"
    # 100 steps of 12 MB: 290,000 pages of 4 KiB, if each step fetched them anew.
    assert count < 3_000 < 100_000 < faults("as it is")[1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_a_user_who_set_malloc_himself_is_left_alone() -> None:
    kept, count = faults("kept", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert count > 100_000

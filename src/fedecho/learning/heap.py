"""Training on a CPU frees and asks for the same megabytes in every step; the process had better keep them.

glibc gives what is free at the end of its heap back to the system, and every page of it must be fetched again a millisecond
later: some 6 % of the time of a bare loop on LeNet-5 or ResNet-18 (docs/peers.md).
"""

import ctypes
import os
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of malloc.h: how much may lie free at the heap's end, and from which size on a block is mapped on its own."""
KEPT, MAPPED = 1 << 30, 32 << 20
"""32 MB is the most that glibc allows."""
USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""With any of these in the environment its owner has decided."""


@cache
def keep_heap() -> bool:
    """For the rest of this process; whether it could be done. Another C library is left as it is."""
    if any(name in os.environ for name in USERS):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 (a name that no other library has)
        return bool(libc.mallopt(TRIM_THRESHOLD, KEPT)) and bool(libc.mallopt(MMAP_THRESHOLD, MAPPED))
    except (AttributeError, OSError, TypeError):
        return False

"""Files of a run on a disk: never written through a link, readable by no one their folder shuts out, and a full disk told apart.

Nothing is wrong with a run that finds the disk full, and it can go on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ELOOP, ENOSPC
from pathlib import Path

FULL = {ENOSPC, EDQUOT, EFBIG}
"""No space, a quota used up, and a file above the limit of its file system or of the process."""


class DiskFullError(OSError):
    """No more can be written. What was written before is whole; ``advice`` says how to go on."""

    advice = "free some space and try again"

    def __str__(self) -> str:
        return f"the disk is full: cannot write {self.filename} ({self.strerror}); {self.advice}"


@contextmanager
def disk_full_at(path: Path) -> Iterator[None]:
    """A write that finds no space says where: the error of a buffered file does not know its own name."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(error.errno, error.strerror, str(path)) from None


def make_private(folder: Path) -> None:
    """A folder that only its owner may enter. One that is there already stays as its owner made it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_own(path: Path | str, flags: int) -> int:
    """Open a file of ours for writing, never what a link of its name leads to. A new one allows nobody what its folder denies."""
    mode = 0o666 & Path(path).parent.stat().st_mode
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != ELOOP:
            raise
        raise ValueError(f"{path} is a link, and what it leads to is not written: remove the link") from None

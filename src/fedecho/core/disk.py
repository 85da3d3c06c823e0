"""A disk that is full: told apart from other faults, because nothing is wrong with the run and it can go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
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

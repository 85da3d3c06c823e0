"""Memory that does not suffice: told apart from other faults, because nothing is wrong with the run."""

import torch

WORDS = ("out of memory", "allocate memory", "not enough memory", "alloc_failed")
"""Of the libraries that have no error of its own for it. An illegal access to memory is another matter."""


class ShortageError(ValueError):
    """Others hold what is needed."""


def shortage(error: BaseException) -> str:
    """In one line, or empty if it is something else. Python's own error sometimes has no words."""
    if isinstance(error, ShortageError):
        return str(error)
    said = (str(error).strip().splitlines() or ["no more could be had"])[0]
    words = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)
    return f"not enough memory: {said}" if words or isinstance(error, MemoryError | torch.OutOfMemoryError) else ""

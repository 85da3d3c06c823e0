"""Memory that does not suffice: told apart from other faults, because nothing is wrong with the run."""

from errno import ENOMEM

import torch

WORDS = ("out of memory", "allocate memory", "not enough memory", "alloc_failed", "memoryerror")
"""Of those who have no error of their own for it, as workers that report one. An illegal access to memory is another matter."""
GUESS = "out of memory?"
"""What is asked of a worker that died, of whatever."""


class ShortageError(ValueError):
    """Others hold what is needed."""


def shortage(error: BaseException) -> str:
    """In one line, or empty if it is something else. Python's own error sometimes has no words."""
    if isinstance(error, ShortageError):
        return str(error)
    text = str(error).strip()
    words = isinstance(error, RuntimeError) and any(word in text.lower().replace(GUESS, "") for word in WORDS)
    kinds = isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM)
    return f"not enough memory: {(text.splitlines() or ['no more could be had'])[0]}" if words or kinds else ""

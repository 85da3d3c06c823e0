"""Memory that does not suffice: told apart from other faults, because nothing is wrong with the run."""


def shortage(error: BaseException) -> str:
    """In one line, or empty if it is something else. torch says it in words alone, Python sometimes without any."""
    said = (str(error).strip().splitlines() or ["no more could be had"])[0]
    short = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error))
    return f"not enough memory: {said}" if short else ""

"""What an array of images was drawn from: said by a file beside it, ``<array>.npy.json``, which ``synthesize`` writes."""

import json
from pathlib import Path
from typing import Any

from fedecho.core.digest import file_sha256
from fedecho.core.user_files import MIB, read_bytes

PAPER_MODEL = "google/ddpm-cifar10-32"


def beside(array: Path, ending: str) -> Path:
    return array.with_name(array.name + ending)


def origin_of(array: Path) -> dict[str, Any] | None:
    """What is written beside an array; None if there is nothing, or if it speaks of another array."""
    try:
        found = json.loads(read_bytes(beside(array, ".json"), MIB))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("sha256") == file_sha256(array) else None


def drawn_from(array: Path) -> str:
    """For people: the model, and that it is not the paper's if it is not."""
    model = (origin_of(array) or {}).get("model", "unknown origin")
    return f"of {model}" if model == PAPER_MODEL else f"of {model}, in place of {PAPER_MODEL}"

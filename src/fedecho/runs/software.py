"""The software that computes a run: recorded in its header, and compared when it is resumed."""

import json
import mmap
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedecho.runs.config import ConfigError
from fedecho.runs.record import RECORD, Record, read_header
from fedecho.storage.files import source_sha256
from fedecho.version import __version__

LIBRARIES = ("transformers", "tokenizers", "peft", "triton")
COMPARED = {
    "fedecho": "fedecho",
    "source": "source files of fedecho",
    "python": "Python",
    "torch": "torch",
    "numpy": "numpy",
    "cpu": "CPU capability",
    "gpu": "GPU",
    **{name: name for name in LIBRARIES},
}
"""Software that may change results, with display names. The platform is recorded but not compared."""
DIGITS = 16
"""Digits kept of a source digest: enough to tell edits apart."""
EVENT = "software"
LINE_START = f'\n{{"event":"{EVENT}",'.encode()


def software(**more: str) -> dict[str, str]:
    """Versions of all software that may change results. Some libraries are listed only if they were imported."""
    used = {name: sys.modules[name].__version__ for name in LIBRARIES if name in sys.modules}
    return {
        "fedecho": __version__,
        "source": source_sha256()[:DIGITS],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **used,
        "platform": platform.platform(),
        **more,
    }


def check_software(folder: Path, other_software: bool) -> None:
    """Check that the run in ``folder`` was computed with the current software, unless ``other_software`` allows a change."""
    changed = _changed(_last_of(folder))
    if changed and not other_software:
        old, new = (", ".join(f"{COMPARED[name]} {both[of]}" for name, both in changed.items()) for of in (0, 1))
        raise ConfigError(
            f"{folder} was computed with {old}; resuming it with {new} may change the model: restore the former software, "
            "start in another folder, or resume anyway with --other-software (other_software=True), which the record will note"
        )


def note_software(record: Record, folder: Path, say: Callable[[str], None]) -> None:
    """Note a change of software in the record of a resumed run."""
    changed = _changed(_last_of(folder))
    if changed:
        more = {"gpu": changed["gpu"][1]} if "gpu" in changed else {}
        record.write({"event": EVENT, "software": software(**more)})
        record.flush()
        changes = ", ".join(f"{COMPARED[name]} {new} in place of {old}" for name, (old, new) in changed.items())
        say(f"resuming with other software: {changes}")


def _changed(before: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The old and new version of all software that changed, by name. A library may not have been imported yet."""
    now, found = software(), {}
    for name in COMPARED:
        if name in before:
            current = now.get(name) or (_gpu() if name == "gpu" else _installed(name))
            old, new = _compared(name, str(before[name])), _compared(name, current)
            if old != new:
                found[name] = (old, new)
    return found


def _compared(name: str, text: str) -> str:
    """The part of a version that may change results. Python 3.11 and 3.12 sum floats differently, patch releases do not."""
    return ".".join(text.split(".")[:2]) if name == "python" else text


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "(none)"


def _last_of(folder: Path) -> dict[str, Any]:
    """The software that last computed a run, from the last ``software`` line or the header. Reads only that line."""
    header = read_header(folder)
    found, execution = header.get("software"), header["execution"]
    path = folder / RECORD
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        start = whole.rfind(LINE_START)
        if start >= 0 and (end := whole.find(b"\n", start + 1)) < 0:  # cut off by a crash
            start = whole.rfind(LINE_START, 0, start)
            end = whole.find(b"\n", start + 1)
        if start >= 0:
            try:
                found = json.loads(whole[start:end])["software"]
            except (ValueError, KeyError, RecursionError):
                raise ValueError(f"{path} has a damaged software line; start in a new folder") from None
    # Without any GPU, the executor reports that it needs one.
    gpu = {"gpu": execution["device"]} if "device" in execution and torch.cuda.is_available() else {}
    return gpu | found if isinstance(found, dict) else gpu

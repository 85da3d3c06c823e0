"""The software that computes a run: written in its record, and compared before the run goes on. Other software, other bits."""

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

from fedecho.core.digest import source_sha256
from fedecho.experiments.config import ConfigError
from fedecho.experiments.record import RECORD, Record, read_header
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
"""What may change a number, and what it is called. The platform may not."""
DIGITS = 16
"""Of the digest: enough to tell any two edits apart, short enough to be read out."""
EVENT = "software"
BEGINS = f'\n{{"event":"{EVENT}",'.encode()


def software(**more: str) -> dict[str, str]:
    """Versions of all that may change a number; of some libraries, where they were used."""
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
    """Is the run in ``folder`` computed by this very software? If not, it goes on only where ``other_software`` is allowed."""
    changed = _changed(_last_of(folder))
    if changed and not other_software:
        was, now = (", ".join(f"{COMPARED[name]} {both[of]}" for name, both in changed.items()) for of in (0, 1))
        raise ConfigError(
            f"{folder} was computed by {was}, and is now to go on with {now}, which may give another model: put the former back, "
            "start in another folder, or go on all the same with --other-software (other_software=True), which its record will say"
        )


def note_software(record: Record, folder: Path, say: Callable[[str], None]) -> None:
    """A line in the record, from which on it is of other software than before."""
    changed = _changed(_last_of(folder))
    if changed:
        more = {"gpu": changed["gpu"][1]} if "gpu" in changed else {}
        record.write({"event": EVENT, "software": software(**more)})
        record.flush()
        told = ", ".join(f"{COMPARED[name]} {now} in place of {was}" for name, (was, now) in changed.items())
        say(f"going on with other software: {told}")


def _changed(before: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By name: what it was and what it is. Records of before name less; a library may not be imported yet."""
    now, found = software(), {}
    for name in COMPARED:
        if name in before:
            is_now = now.get(name) or (_gpu() if name == "gpu" else _installed(name))
            was, here = _compared(name, str(before[name])), _compared(name, is_now)
            if was != here:
                found[name] = (was, here)
    return found


def _compared(name: str, text: str) -> str:
    """Python 3.12 adds floats otherwise than 3.11; its patches change no number."""
    return ".".join(text.split(".")[:2]) if name == "python" else text


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "(none)"


def _last_of(folder: Path) -> dict[str, Any]:
    """What the header says, or the last line since that says it anew. Of a record of gigabytes only that line is read."""
    header = read_header(folder)
    found, execution = header.get("software"), header["execution"]
    path = folder / RECORD
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        start = whole.rfind(BEGINS)
        if start >= 0 and (end := whole.find(b"\n", start + 1)) < 0:  # torn by a crash
            start = whole.rfind(BEGINS, 0, start)
            end = whole.find(b"\n", start + 1)
        if start >= 0:
            try:
                found = json.loads(whole[start:end])["software"]
            except (ValueError, KeyError, RecursionError):
                raise ValueError(f"{path} has a damaged line of software; start in a new folder") from None
    # Without any GPU the executor itself says that it needs one.
    gpu = {"gpu": execution["device"]} if "device" in execution and torch.cuda.is_available() else {}
    return gpu | found if isinstance(found, dict) else gpu

"""Count SGD steps, note when the first began, and read what a runner reports at its end.

Every process counts in a file of its own, in the folder named by ``PEERS_TALLY``: a peer's workers are counted too, and what
they trained for nothing.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

FOLDER, WARM = "PEERS_TALLY", "PEERS_WARM"
COUNT, FIRST, WARMED, FIRST_CPU, LAST_CPU = range(5)
_pages: dict[int, np.memmap] = {}


def _page() -> np.memmap:
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.tally"
    return np.memmap(path, np.float64, "w+", shape=(5,))


def step() -> None:
    """A training step begins in this process."""
    pid = os.getpid()
    page = _pages.get(pid)
    if page is None:
        if FOLDER not in os.environ:
            return
        page = _pages[pid] = _page()  # a forked child finds its parent's page under another number
        page[FIRST], page[FIRST_CPU] = time.time(), time.process_time()
    if page[COUNT] == int(os.environ.get(WARM, "-1")):
        page[WARMED] = time.time()
    page[COUNT] += 1
    page[LAST_CPU] = time.process_time()


@dataclass(frozen=True)
class Steps:
    """Over all processes of a run."""

    count: int
    first: float
    warm: tuple[tuple[int, float], ...]
    """Of each process that came to it: the steps after its warm-up, and when that ended."""
    cpu_s: float
    """Seconds of processor time between the first and the last step of each process, together."""

    def per_s(self, ended: float) -> float:
        """Steps a second, warm-ups left out: the sum over processes, which are not warm at the same moment."""
        return sum(count / (ended - when) for count, when in self.warm)


def steps_in(folder: Path, warm_up: int = 0) -> Steps:
    """All that was counted; ``warm_up`` is how many of each process's first steps are not to be timed."""
    pages = [np.fromfile(path, np.float64) for path in sorted(folder.glob("*.tally"))]
    pages = [page for page in pages if page[COUNT] > 0]
    if not pages:
        return Steps(0, 0.0, (), 0.0)
    return Steps(
        int(sum(page[COUNT] for page in pages)),
        float(min(page[FIRST] for page in pages)),
        tuple((int(page[COUNT]) - warm_up, float(page[WARMED])) for page in pages if page[WARMED] > 0),
        float(sum(page[LAST_CPU] - page[FIRST_CPU] for page in pages)),
    )


def versions_of(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "carried along"
    return found


def say(peer: str, *packages: str, updates: int, note: str = "", **more: object) -> None:
    """The one line of a runner, once its training has ended."""
    line = {"peer": peer, "updates": updates, "ended": time.time(), "note": note, "gpu_bytes": _gpu_bytes()}
    print("\n" + json.dumps(line | {"versions": versions_of("torch", *packages)} | more), flush=True)


def _gpu_bytes() -> int:
    """The most that this process's torch has taken of the GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_reserved() if torch is not None and torch.cuda.is_initialized() else 0


def heard(output: str) -> dict[str, object] | None:
    """A runner's line among whatever else it printed."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"peer"'):
            told: dict[str, object] = json.loads(line)
            return told
    return None

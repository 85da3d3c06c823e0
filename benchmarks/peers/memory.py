"""The memory of a run, seen from outside: the proportional shares (PSS) of all its processes, so that what they share counts once.

A run's processes are known by a word in their environment, which children inherit, also those whose parent is gone.
"""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

PAUSE_S = 0.2


def processes_with(word: str) -> list[int]:
    """Their numbers, this process left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if word.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def share_of(process: int) -> int:
    """Bytes; 0 for one that has gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


class Watch:
    """Looks again and again until it is told to stop; ``peak`` in bytes."""

    def __init__(self, word: str) -> None:
        self.peak = 0
        self._word, self._over = word, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak

    def _look(self) -> None:
        while not self._over.wait(PAUSE_S):
            self.peak = max(self.peak, sum(share_of(process) for process in processes_with(self._word)))


def end(word: str) -> None:
    """End what a run has left behind."""
    for process in processes_with(word):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)

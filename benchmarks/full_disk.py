"""Fill the disk at a random write, with a small tmpfs or the kernel's file-size limit.

Where this process may mount a tmpfs, every other time is one (ENOSPC); else all are limits on the size of a file (EFBIG).
"""

import resource
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.children import Ended, Happening, child
from fedecho.core.randomness import below
from fedecho.runs.record import RECORD, read_record
from fedecho.storage.checkpoint import load_checkpoint

Digests = tuple[str, str, str]
TMPFS = "size=1m"
FILLER = "filler"
LAST_CALLS = 10
MOST_BYTES = 16_384
"""The limit on a file's size is drawn below it: about a checkpoint."""


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """A tmpfs of a megabyte at ``place``; False if this process may not mount one."""
    place.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    tried = mount and umount and subprocess.run([mount, "-t", "tmpfs", "-o", TMPFS, "tmpfs", place], capture_output=True)
    try:
        yield bool(tried and tried.returncode == 0)
    finally:
        if umount and tried and tried.returncode == 0:
            subprocess.run([umount, "--lazy", place], check=True)  # a checkpoint that was read is still mapped


def fill(place: Path, free: int) -> Happening:
    """Somebody else fills the disk up, all but ``free`` bytes."""

    def happening(name: str, what: tuple[Any, ...]) -> None:
        with (place / FILLER).open("wb", buffering=0) as file:
            with suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            file.truncate(max(0, file.tell() - free))

    return happening


def limit(num_bytes: int) -> Happening:
    """From now on no file may grow above that. A write that crosses it is done in part."""

    def happening(name: str, what: tuple[Any, ...]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    return happening


def check_stopped(folder: Path, ended: Ended, like: list[dict[str, Any]]) -> str:
    """It said so in one line and left nothing half-done but the record's last line; what was full."""
    told = [line for line in ended.said.splitlines() if "the disk is full" in line]
    assert ended.code == 1, ended.said
    assert "Traceback" not in ended.said, ended.said
    assert len(told) == 1, ended.said
    begun = (folder / RECORD).exists()
    assert told[0].endswith(f"resume with: fedecho resume {folder}" if begun else "then start it again"), told
    left = [path.name for path in folder.iterdir()] if folder.exists() else []
    assert not [name for name in left if name.endswith((".part", ".lock"))], left
    if begun:
        check_nothing_lost(folder, ended, like)
    return told[0].partition("cannot write ")[2].partition(" (")[0].rpartition("/")[2]


def check_nothing_lost(folder: Path, ended: Ended, like: list[dict[str, Any]]) -> None:
    """The newest checkpoint is the last that was finished, and the record up to it is that of the whole run."""
    said: list[str] = []
    found = load_checkpoint(folder, said.append)
    assert not said, said
    if found is None:
        assert ended.last_saved is None
        return
    numbers = dict(found[0]["map"])
    assert numbers["num_moments"] == ended.last_saved
    kept = (folder / RECORD).read_bytes()[: numbers["position"]]
    assert kept.endswith(b"\n")
    arrivals = [line for line in read_record(folder) if line["event"] == "arrival"][: numbers["num_moments"]]
    assert arrivals == like[: numbers["num_moments"]]


def attempt(folder: Path, on_tmpfs: bool, whole: Ended, seed: int, *address: int) -> Ended:
    """Every third time among the last calls, where the model and the summary are written; every other time to the last byte."""
    late, tight = not below(3, seed, "full late", *address), below(2, seed, "quite full", *address)
    num = LAST_CALLS if late else whole.num_calls
    at = whole.num_calls - below(num, seed, "full at call", *address)
    size = 0 if tight else below(MOST_BYTES, seed, "full from byte", *address)
    return child(folder, happens_at=at, happening=fill(folder.parent, size) if on_tmpfs else limit(size))


def full_disks(parent: Path, num: int, seed: int, whole: Ended, reference: Path, digest_of: Callable[[Path], Digests]) -> None:
    like = [line for line in read_record(reference) if line["event"] == "arrival"]
    began, places, digests, number = time.perf_counter(), Counter[str](), Counter[Digests](), 0
    with small_disk(parent / "disk") as mounted:
        while digests.total() < num:
            on_tmpfs = mounted and digests.total() % 2 == 0
            folder = (parent / "disk" if on_tmpfs else parent) / "full"
            ended = attempt(folder, on_tmpfs, whole, seed, number)
            number += 1
            (folder.parent / FILLER).unlink(missing_ok=True)
            if ended.code:  # else all that was left to write did fit: another moment
                name = check_stopped(folder, ended, like)
                places[("a checkpoint" if "checkpoint" in name else name) + (" (ENOSPC)" if on_tmpfs else " (EFBIG)")] += 1
                again = child(folder)
                assert again.code == 0, again.said
                digests[digest_of(folder)] += 1
            shutil.rmtree(folder)
    kind = (
        "a tmpfs filled up, and a limit on the size of files" if mounted else "a limit on the size of files (no right to mount)"
    )
    print(f"disk full: {num} runs, by {kind}, {time.perf_counter() - began:.0f} s")
    for place, count in places.most_common():
        print(f"  full at {place}: {count}")
    print(f"  {digests.total()} final models with {len(digests)} sha256: {next(iter(digests))[0]}")
    assert set(digests) == {digest_of(reference)}, "not the bytes of the run whose disk was not full"

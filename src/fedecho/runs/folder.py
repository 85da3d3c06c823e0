"""A run folder: locked by one process, checked before it is written to, read back, and completed at the end."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from errno import EAGAIN, ENOLCK, ENOSYS, ENOTSUP
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedecho.algorithms.fedecho import Echo
from fedecho.core.server import Server
from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import Experiment
from fedecho.runs.identity import check_same, is_finished, model_digest
from fedecho.runs.record import RECORD, Line, Mark, Record, read_header
from fedecho.runs.record_schema import Header
from fedecho.runs.summary import Summary, accuracies, last_scores
from fedecho.storage.checkpoint import CheckpointError, Every, decode, load_checkpoint, remove_checkpoints, write_atomically
from fedecho.storage.files import disk_full_at, make_private, open_own

ANEW = "start in a new folder"
ITS_OWN = "state"
"""The algorithm's part of a server: it has what types it likes."""


def restored(
    folder: Path,
    server: Server[Any],
    fresh: Mapping[str, Any],
    take: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
) -> Mark | None:
    """Let ``take`` have the newest checkpoint; its place in the record, or None if the run never came to one.

    ``fresh`` is what would be saved of the run as it was put together: what was saved must be of the same kinds.
    """
    found = load_checkpoint(folder, say)
    if found is None:
        return None
    try:
        tree = decode(*found, {"server": {"state": server.state, "models": Every(server.model)}})
        if tree["fingerprint"] != fresh["fingerprint"]:
            raise CheckpointError(f"the checkpoint in {folder} is of another configuration than its record; {ANEW}")
        _check_kinds(tree, fresh, "")
        take(tree)
        return Mark(tree["position"], tree.get("record_sha256"), tree.get("record_others", 0))
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(f"the checkpoint in {folder} is of another fedecho ({told}); {ANEW}") from error


def _check_kinds(found: Any, fresh: Any, name: str) -> None:
    """Is it what could stand where ``fresh`` stands? What was not there yet (None, an empty table) may be anything."""
    if fresh is None:
        return
    if isinstance(fresh, Mapping):
        _of_kind(isinstance(found, Mapping), found, name)
        named = all(isinstance(key, str) for key in fresh)
        for key, value in found.items():
            like = fresh.get(key) if named else next(iter(fresh.values()))
            if key != ITS_OWN:
                _check_kinds(value, like, f"{name}.{key}".removeprefix("."))
    elif isinstance(fresh, list | tuple):
        _of_kind(isinstance(found, list), found, name)
    elif isinstance(fresh, Tensor):
        _of_kind(isinstance(found, Tensor) and (found.shape, found.dtype) == (fresh.shape, fresh.dtype), found, name)
    elif is_dataclass(fresh):
        _of_kind(type(found) is type(fresh), found, name)
        for each in fields(fresh):
            _check_kinds(getattr(found, each.name), getattr(fresh, each.name), f"{name}.{each.name}")
    else:
        kinds = {float: (float, int), str: (str, type(None))}
        _of_kind(type(found) in kinds.get(type(fresh), (type(fresh),)), found, name)


def _of_kind(it_is: bool, found: Any, name: str) -> None:
    if not it_is:
        told = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.40}"
        raise TypeError(f"{name or 'all of it'} is {told}")


LOCK = ".lock"
MODEL = "model.safetensors"
PARTS = ("checkpoint-*.safetensors.part", f"{MODEL}.part", "run.jsonl.part", "summary.json.part")
NO_LOCKS = {ENOLCK, ENOSYS, ENOTSUP}


class FolderInUse(ConfigError):  # noqa: N818 (its name says it)
    """Another process runs what is in this folder."""


def check_folder(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Is this the folder to begin, or to go on, with this experiment? Nothing is written before it is known."""
    if resume and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume")
    if resume:
        check_same(folder, experiment)
    elif is_finished(folder):
        raise ConfigError(f"{folder} already holds a run, which is finished: choose another folder")
    elif (folder / RECORD).exists():
        resumable(folder)
        raise ConfigError(f"{folder} already holds a run: `fedecho resume {folder}` goes on with it")
    elif (folder / MODEL).exists():
        raise ConfigError(f"{folder / MODEL} is not of a run, which would write its own over it: choose another folder")


def is_deployed(header: Mapping[str, Any]) -> bool:
    """Did its clients train on nodes of a network?"""
    return bool(header["execution"].get("executor") == "flower")


def resumable(folder: Path) -> Header:
    """The header of a run that can go on in this process. A deployed one goes on from its app, where its nodes are."""
    header = read_header(folder)
    if is_deployed(header) and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume; submit its app with another run folder")
    if is_deployed(header):
        raise ConfigError(
            f"{folder} holds a run over a network: submit its app again with the same run folder (fedecho submit) and it goes on"
        )
    return header


@contextmanager
def owned(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Make the folder, its owner's alone, and keep others out of it. The kernel gives the lock back however this process ends."""
    was_there = folder.exists()
    with disk_full_at(folder):
        make_private(folder)
        lock = _locked(folder / LOCK, say)
    try:
        remove_parts(folder)
        yield
    finally:
        # While it is still held, so that the name is never that of a lock somebody else has taken.
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)
        if not was_there:
            with suppress(OSError):
                folder.rmdir()  # only if nothing came of it


@contextmanager
def own_folder(base: Path) -> Iterator[Path]:
    """The first of NAME, NAME-2, NAME-3, ... that is not there, made now: of two processes that look at once each gets its own."""
    was_there = base.parent.exists()
    base.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered(base):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    try:
        yield folder
    finally:
        with suppress(OSError):  # they are removed only if nothing came of it
            folder.rmdir()
            if not was_there:
                base.parent.rmdir()


@contextmanager
def unused_folder(base: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """The first of NAME, NAME-2, NAME-3, ... that no other process uses, which is then ours until the end."""
    with ExitStack() as stack:
        for folder in numbered(base):
            with suppress(FolderInUse):
                stack.enter_context(owned(folder, say))
                break
        yield folder


def numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def is_tidy(folder: Path) -> bool:
    """A process that was killed right after its summary had no time to remove its checkpoints and its lock."""
    return not any(next(folder.glob(pattern), None) for pattern in ("checkpoint-*", LOCK))


def tidy_finished(folder: Path, say: Callable[[str], None]) -> None:
    """Remove what such a process left."""
    if not is_tidy(folder):
        with owned(folder, say):
            remove_checkpoints(folder)


def remove_parts(folder: Path) -> None:
    """What a killed process had begun to write."""
    for pattern in PARTS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _locked(path: Path, say: Callable[[str], None]) -> int:
    """An open file that holds the lock of this name. A file that lost its name while we waited for it is not the lock."""
    while True:
        file = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                say(f"{path.parent} is on a file system without locks: see to it that no other process uses it")
                return file
            owner = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno != EAGAIN:
                raise
            who = f"another process ({owner})" if owner.isdecimal() else "another process"
            raise FolderInUse(f"{path.parent} is in use by {who}: wait for it or stop it, or choose another folder") from None
        if _has_name(file, path):
            with suppress(OSError):  # for a person to read; a disk may be too full even for that
                os.truncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            return file
        os.close(file)


def _has_name(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def summary_of(server: Server[Any], evaluations: Sequence[Line], **known: Any) -> Summary:
    """What the server and the evaluations tell; ``known`` is the rest, by the names of the summary's fields."""
    bank = server.state.bank if isinstance(server.state, Echo) else None
    return Summary(
        num_versions=server.model.version,
        accepted=server.counts["accepted"],
        rejected=server.counts["rejected"],
        lost=server.counts["lost"],
        reasons=dict(server.reasons),
        peak_versions_alive=server.versions.peak_alive,
        bank_bytes=0 if bank is None else bank.num_bytes,
        model_sha256=model_digest(server.model.weights),
        scores=last_scores(evaluations),
        **accuracies(evaluations),
        **known,
    )


def write_end(folder: Path, record: Record, named: Mapping[str, Tensor], summary: Summary) -> None:
    """The summary last but for the checkpoints: a run that has one is finished."""
    record.sync()
    # One entry: safetensors writes several in an order that changes from process to process.
    write_atomically(folder / MODEL, save(dict(named), {"format": "pt"}))
    summary.write(folder)
    remove_checkpoints(folder)

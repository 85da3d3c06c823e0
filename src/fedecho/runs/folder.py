"""The run folder: locking, checks before writing, restoring a checkpoint, and the final files."""

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

from fedecho.algorithms.fedecho import FedEchoState
from fedecho.core.server import Server
from fedecho.runs.config import ConfigError
from fedecho.runs.experiment import Experiment
from fedecho.runs.identity import check_same, is_finished, model_digest
from fedecho.runs.record import RECORD, JsonObject, Record, RecordPosition, read_header
from fedecho.runs.record_schema import Header
from fedecho.runs.summary import SUMMARY, Summary, accuracies, last_scores
from fedecho.storage.checkpoint import CheckpointError, SameTemplate, decode, load_checkpoint, remove_checkpoints
from fedecho.storage.files import disk_full_at, make_private, open_own, write_atomically

ADVICE = "start in a new folder"
ALGORITHM_STATE = "state"
"""The algorithm's part of a server's state. Its types are up to the algorithm and are not checked."""


def restore_checkpoint(
    folder: Path,
    server: Server[Any],
    fresh: Mapping[str, Any],
    take: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
) -> RecordPosition | None:
    """Load the newest checkpoint, pass it to ``take``, and return its position in the record. None if there is no checkpoint.

    ``fresh`` is what a checkpoint of the newly built run would hold. The loaded one must have the same types.
    """
    loaded = load_checkpoint(folder, say)
    if loaded is None:
        return None
    try:
        tree = decode(*loaded, {"server": {"state": server.state, "models": SameTemplate(server.model)}})
        if tree["fingerprint"] != fresh["fingerprint"]:
            raise CheckpointError(f"the checkpoint in {folder} has another configuration than its record; {ADVICE}")
        _check_types(tree, fresh, "")
        take(tree)
        return RecordPosition(
            tree["position"], tree["record_sha256"], tree.get("record_others", 0)
        )  # deployments do not sample
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(
            f"the checkpoint in {folder} was written by another version of fedecho ({cause}); {ADVICE}"
        ) from error


def _check_types(saved: Any, fresh: Any, name: str) -> None:
    """Check that ``saved`` has the types of ``fresh``. Where ``fresh`` is None or an empty table, anything is accepted."""
    if fresh is None:
        return
    if isinstance(fresh, Mapping):
        _require(isinstance(saved, Mapping), saved, name)
        named = all(isinstance(key, str) for key in fresh)
        for key, value in saved.items():
            like = fresh.get(key) if named else next(iter(fresh.values()))
            if key != ALGORITHM_STATE:
                _check_types(value, like, f"{name}.{key}".removeprefix("."))
    elif isinstance(fresh, list | tuple):
        _require(isinstance(saved, list), saved, name)
    elif isinstance(fresh, Tensor):
        _require(isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (fresh.shape, fresh.dtype), saved, name)
    elif is_dataclass(fresh):
        _require(type(saved) is type(fresh), saved, name)
        for each in fields(fresh):
            _check_types(getattr(saved, each.name), getattr(fresh, each.name), f"{name}.{each.name}")
    else:
        accepted = {float: (float, int), str: (str, type(None))}
        _require(type(saved) in accepted.get(type(fresh), (type(fresh),)), saved, name)


def _require(fits: bool, saved: Any, name: str) -> None:
    if not fits:
        shown = f"a tensor of shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else f"{saved!r:.40}"
        raise TypeError(f"{name or 'the whole checkpoint'} is {shown}")


LOCK = ".lock"
MODEL = "model.safetensors"
PARTS = ("checkpoint-*.safetensors.part", f"{MODEL}.part", "run.jsonl.part", "summary.json.part")
NO_LOCKS = {ENOLCK, ENOSYS, ENOTSUP}


class FolderInUse(ConfigError):  # noqa: N818 (reads better without a suffix)
    """Another process uses this run folder."""


def check_folder(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Check that this experiment may be started, or resumed, in this folder. Nothing is written."""
    for name in (SUMMARY, MODEL):
        if (folder / name).exists() and not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is not a regular file, so the run could not end: remove it")
    if resume and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume")
    if resume:
        check_same(folder, experiment)
    elif is_finished(folder):
        raise ConfigError(f"{folder} already holds a finished run: choose another folder")
    elif (folder / RECORD).exists():
        resumable(folder)
        raise ConfigError(f"{folder} already holds a run: continue it with `fedecho resume {folder}`")
    elif (folder / MODEL).exists():
        raise ConfigError(f"{folder / MODEL} does not belong to a run and would be overwritten: choose another folder")


def is_deployed(header: Mapping[str, Any]) -> bool:
    """Is this the header of a deployed run, whose clients trained on the nodes of a network?"""
    return bool(header["execution"].get("executor") == "flower")


def resumable(folder: Path) -> Header:
    """Read the header of a run that can be resumed in this process. A deployed run must be resumed by its app instead."""
    header = read_header(folder)
    if is_deployed(header) and is_finished(folder):
        raise ConfigError(f"{folder} holds a finished run: there is nothing to resume; submit its app with another run folder")
    if is_deployed(header):
        raise ConfigError(
            f"{folder} holds a deployed run: submit its app again with the same run folder to resume it (fedecho submit)"
        )
    return header


@contextmanager
def locked_folder(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Create the folder (readable by its owner only) and lock it. The kernel releases the lock however this process ends."""
    existed = folder.exists()
    with disk_full_at(folder):
        make_private(folder)
    try:
        with locked_file(folder / LOCK, folder, say):
            remove_parts(folder)
            yield
    finally:
        if not existed:
            with suppress(OSError):
                folder.rmdir()  # succeeds only if the folder is empty


@contextmanager
def locked_file(path: Path, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock this file, which stands for the use of ``folder``, and remove it in the end."""
    with disk_full_at(path.parent):
        lock = _locked(path, folder, say)
    try:
        yield
    finally:
        # Unlinked while the lock is still held: otherwise the file might already be another process's lock.
        path.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def new_folder(base: Path) -> Iterator[Path]:
    """Create the first of NAME, NAME-2, NAME-3, ... that does not exist. Concurrent processes get different folders."""
    parent_existed = base.parent.exists()
    base.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered(base):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    try:
        yield folder
    finally:
        with suppress(OSError):  # empty folders are removed, others are kept
            folder.rmdir()
            if not parent_existed:
                base.parent.rmdir()


@contextmanager
def unused_folder(base: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Lock the first of NAME, NAME-2, NAME-3, ... that no other process uses."""
    with ExitStack() as stack:
        for folder in numbered(base):
            with suppress(FolderInUse):
                stack.enter_context(locked_folder(folder, say))
                break
        yield folder


def numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def is_tidy(folder: Path) -> bool:
    """Are there no leftover checkpoints or lock? A process killed right after writing its summary leaves them behind."""
    return not any(next(folder.glob(pattern), None) for pattern in ("checkpoint-*", LOCK))


def tidy_finished(folder: Path, say: Callable[[str], None]) -> None:
    """Remove leftovers of a killed process from a finished run's folder."""
    if not is_tidy(folder):
        with locked_folder(folder, say):
            remove_checkpoints(folder)


def remove_parts(folder: Path) -> None:
    """Remove partially written files of a killed process."""
    for pattern in PARTS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _locked(path: Path, folder: Path, say: Callable[[str], None]) -> int:
    """Open and lock the file. If its name was unlinked in the meantime, the lock is worthless: try again."""
    while True:
        file = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                say(f"{folder} is on a file system without locks: make sure that no other process uses it")
                return file
            owner = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno != EAGAIN:
                raise
            who = f"another process ({owner})" if owner.isdecimal() else "another process"
            raise FolderInUse(f"{folder} is in use by {who}: wait for it or stop it, or choose another folder") from None
        if _has_name(file, path):
            with suppress(OSError):  # informative only; the disk may be full
                os.truncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            return file
        os.close(file)


def _has_name(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def summary_of(server: Server[Any], evaluations: Sequence[JsonObject], **other_fields: Any) -> Summary:
    """Build the summary from the server's counts and the evaluations. ``other_fields`` are its remaining fields."""
    bank = server.state.bank if isinstance(server.state, FedEchoState) else None
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
        **other_fields,
    )


def finish_folder(folder: Path, record: Record, named: Mapping[str, Tensor], summary: Summary) -> None:
    """Write the model and the summary, then remove the checkpoints. A run that has a summary is finished."""
    record.sync()
    # Only one metadata entry: safetensors writes several in an order that differs between processes.
    write_atomically(folder / MODEL, save(dict(named), {"format": "pt"}))
    summary.write(folder)
    remove_checkpoints(folder)

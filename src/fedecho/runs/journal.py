"""The journal of a run, simulated or deployed: its record, its checkpoints, and in the end its model and summary."""

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save
from torch import Tensor

from fedecho.algorithms.fedecho import FedEchoState
from fedecho.core.loop import Moment
from fedecho.core.server import Server
from fedecho.runs.config import fingerprint
from fedecho.runs.distillation_advice import DistillationAdvice
from fedecho.runs.folder import MODEL
from fedecho.runs.identity import Identity, model_digest
from fedecho.runs.record import JsonObject, Record, RecordPosition, digest_and_evaluations, read_header
from fedecho.runs.software import note_software
from fedecho.runs.summary import Summary, accuracies, last_scores
from fedecho.storage.checkpoint import (
    CheckpointError,
    SameTemplate,
    decode,
    load_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)
from fedecho.storage.files import write_atomically

START = RecordPosition(0, None)
ADVICE = "start in a new folder"
SAVE_SHARE = 20
"""Saving takes at most this fraction (1/20) of the time."""
ALGORITHM_STATE = "state"
"""The algorithm's part of a server's state. Its types are up to the algorithm and are not checked."""


class Checkpointed(Protocol):
    """The part of a run that is in its checkpoints besides the server and the position in the record."""

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, tree: Mapping[str, Any], /) -> None: ...


class Journal:
    """Records and checkpoints one run. The record is in memory until ``begin`` or ``reopen``, and always without a folder."""

    def __init__(
        self,
        identity: Identity,
        server: Server[Any],
        rest: Checkpointed,
        folder: Path | None,
        class_of: Callable[[int], str],
        every: int = 1,
    ) -> None:
        self.identity, self.server, self.folder = identity, server, folder
        self.record = Record.in_memory(class_of, every)
        self.num_moments = 0
        self._rest, self._class_of, self._every = rest, class_of, every
        self._config = identity.config
        self._advice = DistillationAdvice(server.algorithm)
        self._saved_at, self._save_cost_s = time.perf_counter(), 0.0

    def begin(self, folder: Path, header: JsonObject) -> None:
        """Start the record of a new run."""
        self.record = Record.new(folder, self._class_of, header, self._every)

    def restore(self, folder: Path, say: Callable[[str], None]) -> RecordPosition | None:
        """Restore the run from its newest checkpoint. Return the checkpoint's position in the record, or None if there is none.

        The checkpoint must have the types of one that the newly built run would write.
        """
        self._config = read_header(folder)[
            "config"
        ]  # whose fingerprint the checkpoints have; an older fedecho has fewer settings
        loaded = load_checkpoint(folder, say)
        if loaded is None:
            return None
        fresh = self._state(START)
        try:
            tree = decode(*loaded, {"server": {"state": self.server.state, "models": SameTemplate(self.server.model)}})
            if tree["fingerprint"] != fresh["fingerprint"]:
                raise CheckpointError(f"the checkpoint in {folder} has another configuration than its record; {ADVICE}")
            _check_types(tree, fresh, "")
            self.server.restore(tree["server"])
            self.num_moments = tree["num_moments"]
            self._rest.restore(tree)
            return RecordPosition(tree["position"], tree["record_sha256"], tree.get("record_others", 0))
        except CheckpointError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise CheckpointError(
                f"the checkpoint in {folder} was written by another version of fedecho ({cause}); {ADVICE}"
            ) from error

    def reopen(self, folder: Path, mark: RecordPosition | None, say: Callable[[str], None]) -> None:
        """Continue the record at ``mark``, the position of the checkpoint (None: from its header)."""
        self.record = Record.continued(folder, self._class_of, mark, self._every)
        note_software(self.record, folder, say)
        self._advice.recall(self.record.lines())

    def see(self, moment: Moment, say: Callable[[str], None]) -> None:
        """Record a moment, with the advice for which it gives a reason."""
        self.num_moments += 1
        self.record.moment(moment)
        if advice := self._advice.see(moment, self.record):
            say(advice)

    def is_due(self, pause_s: float = 0.0) -> bool:
        """Whether ``pause_s`` seconds have passed since the last checkpoint, and enough for saving to be cheap."""
        return time.perf_counter() - self._saved_at >= max(pause_s, SAVE_SHARE * self._save_cost_s)

    def save(self) -> None:
        """Write a checkpoint, if there is a folder."""
        if self.folder is None:
            return
        began = time.perf_counter()
        save_checkpoint(self.folder, self.num_moments, self._state(self.record.sync()))
        self._saved_at = time.perf_counter()
        self._save_cost_s = self._saved_at - began

    def _state(self, mark: RecordPosition) -> dict[str, Any]:
        """The content of a checkpoint, with the record at ``mark``."""
        return {
            "fingerprint": "" if self._config is None else fingerprint(self._config),
            "server": self.server.snapshot(),
            "position": mark.position,
            "record_sha256": mark.sha256,
            "record_others": mark.others,
            "num_moments": self.num_moments,
            **self._rest.snapshot(),
        }

    def finish(self, named: Mapping[str, Tensor], **other_fields: Any) -> tuple[Summary, list[JsonObject]]:
        """Return the summary and the evaluations. ``other_fields`` are the summary's fields that only the transport knows.

        With a folder, the model (its ``named`` tensors) and the summary are written, and then the checkpoints removed: a run that
        has a summary is finished.
        """
        server = self.server
        arrivals_sha256, evaluations = digest_and_evaluations(self.record.lines())
        bank = server.state.bank if isinstance(server.state, FedEchoState) else None
        summary = Summary(
            name=self.identity.name,
            algorithm=self.identity.algorithm,
            seed=self.identity.seed,
            num_versions=server.model.version,
            accepted=server.counts["accepted"],
            rejected=server.counts["rejected"],
            lost=server.counts["lost"],
            reasons=dict(server.reasons),
            peak_versions_alive=server.versions.peak_alive,
            bank_bytes=0 if bank is None else bank.num_bytes,
            model_sha256=model_digest(server.model.weights),
            arrivals_sha256=arrivals_sha256,
            record_every=self._every,
            scores=last_scores(evaluations),
            **accuracies(evaluations),
            **other_fields,
        )
        if self.folder is not None:
            self.record.sync()
            # Only one metadata entry: safetensors writes several in an order that differs between processes.
            write_atomically(self.folder / MODEL, save(dict(named), {"format": "pt"}))
            summary.write(self.folder)
            remove_checkpoints(self.folder)
        return summary, evaluations

    def close(self) -> None:
        self.record.close()


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

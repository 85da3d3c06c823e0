"""The run folder of a deployed run: record, checkpoints and summary, as in a simulation."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flwr
from safetensors.torch import load_file
from torch import Tensor

from fedecho.core.layout import Layout
from fedecho.core.loop import Moment
from fedecho.core.server import Server
from fedecho.core.types import Lost
from fedecho.flower.transport import GridTransport
from fedecho.learning.privacy import Privacy
from fedecho.runs.build import NameTensors
from fedecho.runs.config import ConfigError, completed, differences, fingerprint
from fedecho.runs.folder import MODEL, finish_folder, is_tidy, locked_folder, restore_checkpoint, summary_of
from fedecho.runs.identity import check_software, is_finished, note_software, software
from fedecho.runs.privacy_budget import privacy_spent, reports
from fedecho.runs.record import INITIAL, RECORD, JsonObject, Record, RecordPosition, arrivals_digest, read_header, read_record
from fedecho.runs.record_schema import Header, Spent
from fedecho.runs.summary import Summary, staleness
from fedecho.storage.checkpoint import remove_checkpoints, save_checkpoint

IN_FLIGHT = "in flight when the server stopped"
SAVE_SHARE = 20
"""Arrivals between versions are checkpointed only while that takes less than this fraction (1/20) of the time."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The name of a run and everything it is made of."""

    name: str
    algorithm: str
    seed: int
    num_versions: int
    config: JsonObject | None = None
    header: JsonObject = field(default_factory=dict)
    privacy: Privacy = field(default_factory=Privacy)
    other_software: bool = False
    """Resume a run that was started with other software versions; the record notes the change."""
    folder_setting: str = "out"
    """The name of the user's setting for the run folder, for error messages."""


class _Nodes:
    """Stands in for runtime classes, which only the simulator has."""

    def class_of(self, client: int) -> str:
        return "node"

    def draw(self, client: int, dispatch: int) -> float:
        raise NotImplementedError("a deployment measures time and draws none")


class Journal:
    """Records and checkpoints one run, from its start or last checkpoint to its summary; in memory if ``folder`` is None."""

    def __init__(
        self,
        identity: Identity,
        server: Server[Any],
        transport: GridTransport,
        layout: Layout,
        folder: Path | None,
        say: Callable[[str], None] = lambda text: None,
        named: NameTensors | None = None,
    ) -> None:
        """``named`` gives the tensors of the model file; by default those of the layout, which are federated."""
        self.identity, self.server, self.transport, self.layout = identity, server, transport, layout
        self.folder = folder
        self._named = named or layout.named
        self._say = say
        self._lock = ExitStack()
        self._config = identity.config
        self._save_cost_s = 0.0
        self._saved_at = 0.0
        self.num_moments = 0
        self.resumed = False
        self.finished: Summary | None = None
        """The summary of a run that was killed after it had finished and is submitted again: nothing is left to do."""
        self.earlier_reports: Counter[int] = Counter()
        """Reports by client that may have been sent after a checkpoint and were lost by a resume; they still cost privacy."""
        try:
            self.record = self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> Record:
        if self.folder is None:
            return Record.in_memory(_Nodes())
        was_tidy = is_tidy(self.folder)
        self._lock.enter_context(locked_folder(self.folder, self._say))
        if is_finished(self.folder):
            return self._tidied(self.folder, was_tidy)
        if not (self.folder / RECORD).exists():
            return Record.new(self.folder, _Nodes(), self._header())
        header = read_header(self.folder)
        self._check_same(self.folder, header)
        check_software(self.folder, self.identity.other_software)
        self._config = header.get("config")  # as in the checkpoints, whose fingerprint must match
        self.resumed = True
        mark = restore_checkpoint(self.folder, self.server, self._state(RecordPosition(0, None)), self._restore, self._say)
        self.earlier_reports += self._reports_after(self.folder, None if mark is None else mark.position)
        record = Record.continued(self.folder, _Nodes(), mark)
        note_software(record, self.folder, self._say)
        return record

    def _tidied(self, folder: Path, was_tidy: bool) -> Record:
        """Clean up a finished run whose process was killed before the clean-up; submitting it again is not an error."""
        if was_tidy:
            setting = self.identity.folder_setting
            raise ConfigError(f"{folder} already holds a finished run: choose another folder ({setting})")
        self._check_same(folder, read_header(folder))
        self.finished = Summary.read(folder)
        remove_checkpoints(folder)
        self._say(
            f"the run in {folder} had already finished when its server was killed: its checkpoints are removed, nothing is trained"
        )
        return Record.in_memory(_Nodes())

    def first_scores(self, scores: Mapping[str, Any] | None) -> None:
        """Record the evaluation of version 0, which does not count in means and maxima."""
        if scores is not None:
            self.record.evaluation(0, 0.0, scores, {}, INITIAL)

    def past(self) -> Iterator[JsonObject]:
        """The record so far of a run that was resumed or has already finished."""
        if self.folder is None or not (self.resumed or self.finished):
            return iter(())
        return read_record(self.folder) if self.finished else self.record.lines()

    def model(self) -> dict[str, Tensor]:
        """The model of a finished run, from its file."""
        assert self.folder is not None  # noqa: S101 (a finished run has a folder)
        return load_file(self.folder / MODEL)

    def _reports_after(self, folder: Path, position: int | None) -> Counter[int]:
        """Reports in the lines to be cut off, plus one for each client without an open job, which may have been sent one since."""
        lines = read_record(folder, position or 0)
        return reports(lines, lost_too=True) + Counter(set(range(self.server.num_clients)) - set(self.server.open))

    def moment(self, moment: Moment, scores: JsonObject | None) -> None:
        """Record a moment and save a checkpoint: after every version, and after an arrival if saving is cheap enough."""
        self.num_moments += 1
        self.record.moment(moment)
        if moment.step is not None and scores is not None:
            self.record.evaluation(moment.step.model.version, moment.time, scores, {"real_s": round(moment.time, 3)})
        self.record.flush()
        if moment.step is not None or time.monotonic() - self._saved_at >= SAVE_SHARE * self._save_cost_s:
            self.save()

    def lose_open_jobs(self) -> list[Moment]:
        """Record all open jobs as lost after a resume, because answers to messages of the old run are ignored."""
        lost = []
        for client in list(self.server.open):
            lost.append(Moment(self.transport.now, self.server.receive(Lost(client, IN_FLIGHT, IN_FLIGHT)), None))
            self.record.moment(lost[-1])
        if self.resumed:
            self.server.forget_corrections()  # nodes start a new run with an empty context
        return lost

    def save(self) -> None:
        """Write a checkpoint."""
        if self.folder is None:
            return
        started = time.monotonic()
        save_checkpoint(self.folder, self.num_moments, self._state(self.record.sync()))
        self._saved_at = time.monotonic()
        self._save_cost_s = self._saved_at - started

    def _state(self, mark: RecordPosition) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "server": self.server.snapshot(),
            "transport": self.transport.snapshot(),
            "position": mark.position,
            "record_sha256": mark.sha256,
            "num_moments": self.num_moments,
            "earlier_reports": dict(self.earlier_reports),
        }

    def _restore(self, tree: Mapping[str, Any]) -> None:
        self.server.restore(tree["server"])
        self.transport.restore(tree["transport"])
        self.num_moments = tree["num_moments"]
        self.earlier_reports = Counter(tree["earlier_reports"])

    def finish(self) -> Summary:
        """Write the summary and the model, and remove the checkpoints."""
        lines = list(self.record.lines())
        summary = summary_of(
            self.server,
            [line for line in lines if line["event"] == "evaluation"],
            name=self.identity.name,
            algorithm=self.identity.algorithm,
            seed=self.identity.seed,
            virtual_s=self.transport.now,
            real_s=round(self.transport.now, 3),
            arrivals_sha256=arrivals_digest(iter(lines)),
            notes=dict(self.identity.header.get("notes", {})),
            privacy=self._spent(lines) if self.identity.privacy.on else None,
            **staleness(lines),
        )
        if self.folder is not None:
            finish_folder(self.folder, self.record, self._named(self.server.model.weights), summary)
        return summary

    def _spent(self, lines: list[JsonObject]) -> Spent:
        """The privacy budget spent, counting jobs that were lost or still open, whose answers may have been sent."""
        return privacy_spent(
            self.identity.privacy, lines, lost_too=True, more=self.earlier_reports + Counter(self.server.open.keys())
        )

    def close(self) -> None:
        self.record.close()
        self._lock.close()

    def _check_same(self, folder: Path, there: Header) -> None:
        """Raise ConfigError if ``folder`` holds a run with another configuration."""
        here = self._header()
        keys = ("name", "seed", "num_versions", "num_params")
        changes = differences({key: here[key] for key in keys}, {key: there.get(key) for key in keys})
        config = there.get("config") or {}
        # The configuration of an AsyncStrategy has no task and no defaults to fill in.
        changes += differences(here["config"] or {}, completed(config) if "task" in config else config)
        if changes:
            raise ConfigError(f"{folder} holds a run with another configuration: {'; '.join(changes[:3])}")

    @property
    def _fingerprint(self) -> str:
        return "" if self._config is None else fingerprint(self._config)

    def _header(self) -> JsonObject:
        return {
            "format": 1,
            "clock": "real",
            "algorithm": self.identity.algorithm,
            "name": self.identity.name,
            "config": self.identity.config,
            "seed": self.identity.seed,
            "num_versions": self.identity.num_versions,
            "execution": {"executor": "flower", "workers": self.server.concurrency},
            "software": software(flwr=flwr.__version__),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "num_params": self.layout.num_params,
            **self.identity.header,
        }

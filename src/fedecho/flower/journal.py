"""A deployed run's folder: the record, checkpoints and summary of a simulation, kept while the run goes on over a network."""

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
from fedecho.runs.build import Named
from fedecho.runs.config import ConfigError, completed, differences, fingerprint
from fedecho.runs.folder import MODEL, is_tidy, owned, restored, summary_of, write_end
from fedecho.runs.identity import check_software, is_finished, note_software, software
from fedecho.runs.privacy_budget import reports, spent
from fedecho.runs.record import INITIAL, RECORD, Line, Mark, Record, arrivals_digest, read_header, read_record
from fedecho.runs.record_schema import Header, Spent
from fedecho.runs.summary import Summary, staleness
from fedecho.storage.checkpoint import remove_checkpoints, save_checkpoint

IN_FLIGHT = "in flight when the server stopped"
SAVE_SHARE = 20
"""Between two versions, saving an arrival may take one part in so many of the time."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a run is called and what it is made of."""

    name: str
    algorithm: str
    seed: int
    num_versions: int
    config: Line | None = None
    header: Line = field(default_factory=dict)
    privacy: Privacy = field(default_factory=Privacy)
    other_software: bool = False
    """Go on with a run of other software all the same; its record will say so."""
    folder_setting: str = "out"
    """What the user calls the setting that names the run's folder."""


class _Nodes:
    """Runtime classes are the simulator's; a node has none."""

    def class_of(self, client: int) -> str:
        return "node"

    def draw(self, client: int, dispatch: int) -> float:
        raise NotImplementedError("time is measured here, not drawn")


class Journal:
    """Of one run, from its first dispatch or from its last checkpoint to its summary. ``folder`` None keeps all in memory."""

    def __init__(
        self,
        identity: Identity,
        server: Server[Any],
        transport: GridTransport,
        layout: Layout,
        folder: Path | None,
        say: Callable[[str], None] = lambda text: None,
        named: Named | None = None,
    ) -> None:
        """``named`` says what is saved of the model; by default what is federated, which the layout names."""
        self.identity, self.server, self.transport, self.layout = identity, server, transport, layout
        self.folder = folder
        self._named = named or layout.named
        self._say = say
        self._held = ExitStack()
        self._config = identity.config
        self._save_cost_s = 0.0
        self._saved_at = 0.0
        self.num_moments = 0
        self.resumed = False
        self.finished: Summary | None = None
        """Of a run that was killed right after it had finished and is submitted again: nothing is left to do."""
        self.earlier_reports: Counter[int] = Counter()
        """What clients may have sent behind the checkpoints that were gone on from: privacy that is spent all the same."""
        try:
            self.record = self._open()
        except BaseException:
            self._held.close()
            raise

    def _open(self) -> Record:
        if self.folder is None:
            return Record.in_memory(_Nodes())
        was_tidy = is_tidy(self.folder)
        self._held.enter_context(owned(self.folder, self._say))
        if is_finished(self.folder):
            return self._tidied(self.folder, was_tidy)
        if not (self.folder / RECORD).exists():
            return Record.new(self.folder, _Nodes(), self._header())
        there = read_header(self.folder)
        self._check_same(self.folder, there)
        check_software(self.folder, self.identity.other_software)
        self._config = there.get("config")  # as its checkpoints know it, with the settings of its time
        self.resumed = True
        mark = restored(self.folder, self.server, self._state(Mark(0, None)), self._take, self._say)
        self.earlier_reports += self._reports_behind(self.folder, None if mark is None else mark.position)
        record = Record.continued(self.folder, _Nodes(), mark)
        note_software(record, self.folder, self._say)
        return record

    def _tidied(self, folder: Path, was_tidy: bool) -> Record:
        """A run whose process ended before the clean-up was taken for a failed one, so submitting it again is no mistake."""
        if was_tidy:
            setting = self.identity.folder_setting
            raise ConfigError(f"{folder} already holds a finished run: choose another folder ({setting})")
        self._check_same(folder, read_header(folder))
        self.finished = Summary.read(folder)
        remove_checkpoints(folder)
        self._say(f"the run in {folder} had finished before its server was killed: its checkpoints are removed, nothing is run")
        return Record.in_memory(_Nodes())

    def first_scores(self, scores: Mapping[str, Any] | None) -> None:
        """Of version 0: beside the evaluations, whose means and maxima are of what was learnt."""
        if scores is not None:
            self.record.evaluation(0, 0.0, scores, {}, INITIAL)

    def past(self) -> Iterator[Line]:
        """The lines so far of a run that goes on or has finished."""
        if self.folder is None or not (self.resumed or self.finished):
            return iter(())
        return read_record(self.folder) if self.finished else self.record.lines()

    def model(self) -> dict[str, Tensor]:
        """Of a finished run, from its file."""
        assert self.folder is not None  # noqa: S101 (what is finished has one)
        return load_file(self.folder / MODEL)

    def _reports_behind(self, folder: Path, position: int | None) -> Counter[int]:
        """Of the lines that are cut off, and one of every client that may have been sent a job since and has no open one."""
        lines = read_record(folder, position or 0)
        return reports(lines, lost_too=True) + Counter(set(range(self.server.num_clients)) - set(self.server.open))

    def moment(self, moment: Moment, scores: Line | None) -> None:
        """Write it down, then save: a version always, an arrival if saving takes less than a twentieth of the time."""
        self.num_moments += 1
        self.record.moment(moment)
        if moment.step is not None and scores is not None:
            self.record.evaluation(moment.step.model.version, moment.time, scores, {"real_s": round(moment.time, 3)})
        self.record.flush()
        if moment.step is not None or time.monotonic() - self._saved_at >= SAVE_SHARE * self._save_cost_s:
            self.save()

    def lose_what_was_open(self) -> list[Moment]:
        """After a resume: answers to the old run's messages will not be asked for, so what was open is lost, and said to be."""
        lost = []
        for client in list(self.server.open):
            lost.append(Moment(self.transport.now, self.server.receive(Lost(client, IN_FLIGHT, IN_FLIGHT)), None))
            self.record.moment(lost[-1])
        if self.resumed:
            self.server.forget_corrections()  # Flower gives nodes an empty context in a new run
        return lost

    def save(self) -> None:
        if self.folder is None:
            return
        began = time.monotonic()
        save_checkpoint(self.folder, self.num_moments, self._state(self.record.sync()))
        self._saved_at = time.monotonic()
        self._save_cost_s = self._saved_at - began

    def _state(self, mark: Mark) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "server": self.server.snapshot(),
            "transport": self.transport.snapshot(),
            "position": mark.position,
            "record_sha256": mark.sha256,
            "num_moments": self.num_moments,
            "earlier_reports": dict(self.earlier_reports),
        }

    def _take(self, tree: Mapping[str, Any]) -> None:
        self.server.restore(tree["server"])
        self.transport.restore(tree["transport"])
        self.num_moments = tree["num_moments"]
        self.earlier_reports = Counter(tree["earlier_reports"])

    def finish(self) -> Summary:
        """The summary and the model; a finished run needs no checkpoints."""
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
            write_end(self.folder, self.record, self._named(self.server.model.weights), summary)
        return summary

    def _spent(self, lines: list[Line]) -> Spent:
        """Who is at work when the run ends may have sent its answer too."""
        return spent(self.identity.privacy, lines, lost_too=True, more=self.earlier_reports + Counter(self.server.open.keys()))

    def close(self) -> None:
        self.record.close()
        self._held.close()

    def _check_same(self, folder: Path, there: Header) -> None:
        here = self._header()
        keys = ("name", "seed", "num_versions", "num_params")
        found = differences({key: here[key] for key in keys}, {key: there.get(key) for key in keys})
        known = there.get("config") or {}
        # An AsyncStrategy's has no task, and is compared as it stands.
        found += differences(here["config"] or {}, completed(known) if "task" in known else known)
        if found:
            raise ConfigError(f"{folder} holds a run of another configuration: {'; '.join(found[:3])}")

    @property
    def _fingerprint(self) -> str:
        return "" if self._config is None else fingerprint(self._config)

    def _header(self) -> Line:
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

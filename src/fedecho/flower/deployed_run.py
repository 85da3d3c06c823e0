"""A deployed run: its run folder, as in a simulation, and its course from the first nodes to the summary."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import flwr
from safetensors.torch import load_file
from torch import Tensor

from fedecho.core.loop import Moment, drive
from fedecho.core.server import Server
from fedecho.core.types import GlobalModel, Joined, Left, Lost
from fedecho.flower.run_log import RunLog
from fedecho.flower.transport import GridTransport
from fedecho.learning.privacy import Privacy
from fedecho.runs.build import NameTensors
from fedecho.runs.config import ConfigError, completed, differences
from fedecho.runs.folder import MODEL, is_tidy, locked_folder
from fedecho.runs.identity import Identity
from fedecho.runs.journal import Journal
from fedecho.runs.privacy_budget import privacy_spent, reports
from fedecho.runs.record import INITIAL, RECORD, JsonObject, read_header, read_record
from fedecho.runs.run_stats import FailureGuard, check_scores
from fedecho.runs.software import check_software
from fedecho.runs.summary import Summary, is_finished, staleness
from fedecho.storage.checkpoint import remove_checkpoints

IN_FLIGHT = "in flight when the server stopped"
Evaluate = Callable[[GlobalModel], dict[str, Any] | None]
Watch = Callable[[Moment], None]
Say = Callable[[str], None]


class DeployedRun:
    """One deployed run, new or resumed. With ``folder=None`` nothing is saved."""

    def __init__(
        self,
        identity: Identity,
        server: Server[Any],
        transport: GridTransport,
        folder: Path | None,
        *,
        num_params: int,
        named: NameTensors,
        privacy: Privacy | None = None,
        say: Say = lambda text: None,
    ) -> None:
        """``named`` gives the tensors of the model file."""
        self.journal = Journal(identity, server, self, folder, lambda client: "node")
        self.server, self.transport = server, transport
        self.num_params, self.named, self.privacy, self.say = num_params, named, privacy or Privacy(), say
        self.resumed = False
        self.finished: Summary | None = None
        """The summary of a run that was killed after it had finished and is submitted again: nothing is left to do."""
        self.earlier_reports: Counter[int] = Counter()
        """Reports by client that may have been sent after a checkpoint and were lost by a resume; they still cost privacy."""

    @contextmanager
    def opened(self, *, other_software: bool = False, folder_setting: str = "out") -> Iterator["DeployedRun"]:
        """Lock the folder and begin its record, or resume the run in it.

        ``other_software`` allows to resume with other software versions. ``folder_setting`` is the name of the user's setting for
        the folder, for error messages.
        """
        folder = self.journal.folder
        with ExitStack() as stack:
            if folder is not None:
                was_tidy = is_tidy(folder)
                stack.enter_context(locked_folder(folder, self.say))
                if is_finished(folder):
                    self._tidy(folder, was_tidy, folder_setting)
                elif (folder / RECORD).exists():
                    self._resume(folder, other_software)
                else:
                    execution = {"executor": "flower", "workers": self.server.concurrency}
                    header = self.journal.identity.header(execution, self.num_params, flwr=flwr.__version__)
                    self.journal.begin(folder, header | {"clock": "real"})
            stack.callback(self.journal.close)
            yield self

    def _resume(self, folder: Path, other_software: bool) -> None:
        self._check_same(folder)
        check_software(folder, other_software)
        self.resumed = True
        mark = self.journal.restore(folder, self.say)
        # Reports in the lines to be cut off, plus one for each client without an open job, which may have been sent one since.
        self.earlier_reports += reports(read_record(folder, 0 if mark is None else mark.position), lost_too=True)
        self.earlier_reports += Counter(set(range(self.server.num_clients)) - set(self.server.open))
        self.journal.reopen(folder, mark, self.say)

    def _tidy(self, folder: Path, was_tidy: bool, folder_setting: str) -> None:
        """Clean up a finished run whose process was killed before the clean-up; submitting it again is not an error."""
        if was_tidy:
            raise ConfigError(f"{folder} already holds a finished run: choose another folder ({folder_setting})")
        self._check_same(folder)
        self.finished = Summary.read(folder)
        remove_checkpoints(folder)
        self.say(
            f"the run in {folder} had already finished when its server was killed: its checkpoints are removed, nothing is trained"
        )

    def _check_same(self, folder: Path) -> None:
        """Raise ConfigError if ``folder`` holds a run with another configuration."""
        identity, there = self.journal.identity, read_header(folder)
        here = {
            "name": identity.name,
            "seed": identity.seed,
            "num_versions": identity.num_versions,
            "num_params": self.num_params,
        }
        changes = differences(here, {key: there.get(key) for key in here})
        config = there["config"] or {}
        # The configuration of an AsyncStrategy has no task and no defaults to fill in.
        changes += differences(identity.config or {}, completed(config) if "task" in config else config)
        if changes:
            raise ConfigError(f"{folder} holds a run with another configuration: {'; '.join(changes[:3])}")

    def past(self) -> Iterator[JsonObject]:
        """The record so far of a run that was resumed or has already finished."""
        if self.finished is not None and self.journal.folder is not None:
            return read_record(self.journal.folder)
        return self.journal.record.lines() if self.resumed else iter(())

    def saved_model(self) -> dict[str, Tensor]:
        """The model of a finished run, from its file."""
        assert self.journal.folder is not None  # noqa: S101 (a finished run has a folder)
        return load_file(self.journal.folder / MODEL)

    def complete(
        self,
        *,
        evaluate: Evaluate = lambda model: None,
        eval_every: int = 1,
        evaluate_first: bool = False,
        dispatch_after_step: bool = False,
        watch: Watch = lambda moment: None,
    ) -> Summary:
        """Wait for nodes and run to the last version. ``evaluate_first`` also evaluates version 0, outside of all means."""
        if self.finished is not None:
            return self.finished
        server, num_versions = self.server, self.journal.identity.num_versions
        log, failures = RunLog(server, self.journal, self.say), FailureGuard()

        def see(moment: Moment) -> None:
            version = None if moment.step is None else moment.step.model.version
            scores = None
            if version is not None and (version % eval_every == 0 or version == num_versions):
                scores = evaluate(server.model)
                check_scores(version, scores or {})
            self._record(moment, scores)
            watch(moment)
            log.see(moment, scores)
            failures.see(moment.receipt, set(self.transport.roster.clients))

        log.begin(self.past(), self.resumed)
        try:
            if evaluate_first and not self.journal.num_moments and (scores := evaluate(server.model)) is not None:
                self.journal.record.evaluation(0, 0.0, scores, {}, INITIAL)
            present = set(self.transport.gather())
            for moment in self._lose_open_jobs():
                log.see(moment, None)
            for client in range(server.num_clients):
                if client not in present:
                    server.receive(Left(client))  # not recorded: it has not connected yet
                elif client not in server.idle:
                    server.receive(Joined(client))
            drive(server, self.transport, num_versions=num_versions, watch=see, dispatch_after_step=dispatch_after_step)
            summary = self._finish()
        except Exception:
            log.stopped()
            raise
        log.end(summary)
        return summary

    def _record(self, moment: Moment, scores: JsonObject | None) -> None:
        """Record a moment and save a checkpoint: after every version, and after an arrival if saving is cheap enough."""
        self.journal.see(moment, self.say)
        if moment.step is not None and scores is not None:
            costs = {"real_s": round(moment.time, 3)}
            self.journal.record.evaluation(moment.step.model.version, moment.time, scores, costs)
        self.journal.record.flush()
        if moment.step is not None or self.journal.is_due():
            self.journal.save()

    def _lose_open_jobs(self) -> list[Moment]:
        """Record all open jobs as lost after a resume, because answers to messages of the old run are ignored."""
        lost = []
        for client in list(self.server.open):
            lost.append(Moment(self.transport.now, self.server.receive(Lost(client, IN_FLIGHT, IN_FLIGHT)), None))
            self.journal.record.moment(lost[-1])
        if self.resumed:
            self.server.forget_corrections()  # nodes start a new run with an empty context
        return lost

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint holds besides the server and the position in the record."""
        return {"transport": self.transport.snapshot(), "earlier_reports": dict(self.earlier_reports)}

    def restore(self, tree: Mapping[str, Any]) -> None:
        self.transport.restore(tree["transport"])
        self.earlier_reports = Counter(tree["earlier_reports"])

    def _finish(self) -> Summary:
        lines, spent = self.journal.record.lines, None
        if self.privacy.on:  # jobs that were lost or are still open count, because their answers may have been sent
            more = self.earlier_reports + Counter(self.server.open.keys())
            spent = privacy_spent(self.privacy, lines(), lost_too=True, more=more)
        summary, _ = self.journal.finish(
            self.named(self.server.model.weights),
            virtual_s=self.transport.now,
            real_s=round(self.transport.now, 3),
            notes=dict(self.journal.identity.parts.get("notes", {})),
            privacy=spent,
            **staleness(lines()),
        )
        return summary

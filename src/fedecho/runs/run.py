"""Runs an experiment on the virtual clock, and resumes stopped runs."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fedecho.core.loop import Moment, drive
from fedecho.core.types import Weights
from fedecho.executors.worker import refuse_while_importing
from fedecho.runs.build import Simulation, assembled, one_thread
from fedecho.runs.config import ConfigError, from_config
from fedecho.runs.evaluation import Evaluator, TimedTransport
from fedecho.runs.execution import DeviceName, Execution, ExecutorName, check_same_arithmetic, resume_options
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import check_folder, locked_folder, resumable
from fedecho.runs.identity import Identity, check_inputs, header_of, notes_of
from fedecho.runs.journal import Journal
from fedecho.runs.privacy_budget import check_accountant, privacy_spent
from fedecho.runs.record import RECORD, JsonObject, read_header
from fedecho.runs.run_stats import StalenessCounter, StallGuard, Watch
from fedecho.runs.signals import Stop, stop_signals
from fedecho.runs.software import check_software
from fedecho.runs.summary import Summary
from fedecho.storage.files import DiskFullError

CHECKPOINT_S = 30.0
SAME_EXECUTOR = "omit --executor to resume with the same one, or start in another folder"


class Interrupted(Exception):  # noqa: N818 (not an error)
    """The run was stopped on request. It can be resumed from its folder."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    summary: Summary
    evaluations: list[JsonObject]
    weights: Weights
    named: dict[str, Tensor]
    folder: Path | None

    @property
    def accuracy(self) -> float:
        """The mean of the last ten evaluations, 0 to 1."""
        return self.summary.last10_accuracy


def simulate(
    experiment: Experiment,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    executor: ExecutorName = "serial",
    workers: int | None = None,
    precision: Literal["bf16", "fp32"] = "bf16",
    deterministic: bool = False,
    device: DeviceName | None = None,
    address: str | None = None,
    other_software: bool = False,
    checkpoint_s: float = CHECKPOINT_S,
    watch: Watch | None = None,
    stop: Stop | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run an experiment on the virtual clock. With ``out``, the run is recorded in that folder and can be resumed.

    Results are bit-identical for ``serial``, ``pool`` and ``ray``, for any number of workers, and after any number of resumes.
    ``cuda`` has the same schedule and random draws, but rounds differently; with ``deterministic`` it does so reproducibly. With
    ``device="cuda"`` each worker of a pool, or of the Ray cluster at ``address``, has its own GPU. A run that was begun with other
    software is not resumed unless ``other_software`` allows it. ``stop`` says whether the run is to stop, in place of Ctrl-C and
    SIGTERM.
    """
    folder = None if out is None else Path(out)
    refuse_while_importing()
    if experiment.privacy.on:
        check_accountant()
    if not checkpoint_s >= 0:
        raise ConfigError(f"--checkpoint-every must be at least 0 seconds, got {checkpoint_s}")
    execution = Execution(
        executor=executor,
        workers=workers,
        precision=precision,
        deterministic=deterministic,
        device=device,
        address=address,
        other_software=other_software,
    )
    with ExitStack() as stack:
        if folder is not None:
            check_folder(folder, experiment, resume)
            stack.enter_context(locked_folder(folder, say))
            check_folder(folder, experiment, resume)  # again, under the lock
            if resume:
                check_same_arithmetic(folder, read_header(folder)["execution"], execution, SAME_EXECUTOR)
                check_software(folder, other_software)
        stack.enter_context(one_thread())
        simulation = stack.enter_context(assembled(experiment, execution, say))
        stop = stack.enter_context(stop_signals(say, stop))
        return _Run(simulation, folder, checkpoint_s, watch or (lambda moment, scores: None), stop, say).run(resume)


def resume(folder: Path | str, experiment: Experiment | None = None, **options: Any) -> Result:
    """Resume the run in ``folder``. Its record has its configuration; a run with your own classes needs its experiment again.

    A run on a GPU is resumed on a GPU with the same precision. Any other is resumed on the CPU of this process. ``options`` are
    keyword arguments of ``simulate`` that override this.
    """
    folder = Path(folder)
    header = resumable(folder)
    if experiment is None:
        if header["config"] is None:
            raise ConfigError(f"{folder} used your own task or method: resume it from Python with resume(folder, experiment)")
        experiment = from_config(header["config"])
    if "device" in header["execution"]:
        options = resume_options(header["execution"], options.get("executor")) | options
    return simulate(experiment, out=folder, resume=True, **options)


class _Run:
    """The state of one run: its journal, counters and times."""

    def __init__(
        self,
        simulation: Simulation,
        folder: Path | None,
        checkpoint_s: float,
        watch: Watch,
        stop: Stop,
        say: Callable[[str], None],
    ) -> None:
        experiment = simulation.experiment
        self.simulation = simulation
        self.folder = folder
        self.checkpoint_s = checkpoint_s
        self.watch = watch
        self.stop = stop
        self.say = say
        class_of, every = simulation.runtimes.class_of, experiment.record_every or 1
        self.journal = Journal(Identity.of(experiment), simulation.server, self, folder, class_of, every)
        self.stopwatch = TimedTransport(simulation.transport)
        self.real_before = 0.0
        self.stall_guard = StallGuard(experiment)
        # Without a folder, an interrupted evaluation could not be repeated later.
        self.evaluator = Evaluator(simulation, watch, stop if folder is not None else lambda: False)
        self.staleness = StalenessCounter()
        self.began = time.perf_counter()

    @property
    def real_s(self) -> float:
        return self.real_before + time.perf_counter() - self.began

    def run(self, resume: bool) -> Result:
        """Run to the end. A full disk stops the run; its last complete checkpoint remains."""
        try:
            if self.folder is not None and resume:
                self._reopen(self.folder)
            elif self.folder is not None:
                self.journal.begin(self.folder, header_of(self.simulation, self.journal.identity))
            try:
                return self._finish()
            finally:
                self.journal.close()
        except DiskFullError as error:
            begun = self.folder is not None and (self.folder / RECORD).exists()
            error.advice = f"free some space, then {f'resume with: {self._how_to_resume}' if begun else 'start it again'}"
            raise

    def _reopen(self, folder: Path) -> None:
        header = read_header(folder)
        self.simulation.execution.check_same_kernels(folder, header["execution"])
        check_inputs(folder, header.get("inputs") or {}, self.simulation.inputs)
        mark = self.journal.restore(folder, self.say)
        if mark is None:
            self.say(f"no checkpoint in {folder} yet: starting from the beginning")
        self.journal.reopen(folder, mark, self.say)

    def _finish(self) -> Result:
        experiment, server = self.simulation.experiment, self.simulation.server
        if self.evaluator.interrupted:
            now = self.simulation.transport.now
            self.evaluator.report_late(server.model.version, now, self._evaluate(server.model.version, now))
        if not self.evaluator.interrupted and server.model.version < experiment.num_versions:
            drive(
                server,
                self.stopwatch,
                num_versions=experiment.num_versions,
                dispatch_after_step=experiment.dispatch_after_step,
                watch=self._moment,
            )
        if server.model.version < experiment.num_versions or self.evaluator.interrupted:
            self.journal.save()
            how = "" if self.folder is None else f"; resume with: {self._how_to_resume}"
            raise Interrupted(f"stopped at version {server.model.version} of {experiment.num_versions}{how}")
        return self._result()

    def _moment(self, moment: Moment) -> bool:
        self.stopwatch.served()
        self.journal.see(moment, self.say)
        self.stall_guard.see(moment.receipt)
        self.staleness.see(moment.receipt)
        version = None if moment.step is None else moment.step.model.version
        scores = self._evaluate(version, moment.time) if version is not None and self.evaluator.is_due(version) else None
        self.watch(moment, scores)
        if self.stop():
            return True
        if not self.checkpoint_s or self.journal.is_due(self.checkpoint_s):
            self.journal.save()
        return False

    def _evaluate(self, version: int, now: float) -> dict[str, float] | None:
        scores = self.evaluator.scores()
        if scores is not None:
            costs = self.stopwatch.costs() | {"versions_alive": self.simulation.server.versions.num_alive}
            self.journal.record.evaluation(version, now, scores, {"real_s": round(self.real_s, 3), **costs})
        return scores

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint holds besides the server and the position in the record."""
        return {
            "transport": self.simulation.transport.snapshot(),
            "tally": self.staleness.to_tree(),
            "real_s": self.real_s,
            "spent": self.stopwatch.spent(),
            "refused": self.stall_guard.refused,
            "not_finite": self.stall_guard.not_finite,
            "fruitless": self.stall_guard.fruitless,
            "to_judge": self.evaluator.interrupted,
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        self.simulation.transport.restore(tree["transport"], tree["server"]["models"])
        self.real_before = tree["real_s"]
        self.stopwatch.restore(tree["spent"])
        self.stall_guard.refused, self.stall_guard.fruitless = tree["refused"], tree["fruitless"]
        self.stall_guard.not_finite = tree["not_finite"]
        self.evaluator.interrupted = tree["to_judge"]
        self.staleness = StalenessCounter(**tree["tally"])

    @property
    def _how_to_resume(self) -> str:
        if self.journal.identity.config is None:
            return f'fedecho.resume("{self.folder}", experiment) in Python'
        return f"fedecho resume {self.folder}"

    def _result(self) -> Result:
        experiment, weights = self.simulation.experiment, self.simulation.server.model.weights
        named, lines = self.simulation.named(weights), self.journal.record.lines
        summary, evaluations = self.journal.finish(
            named,
            virtual_s=self.simulation.transport.now,
            real_s=round(self.real_s, 3),
            notes=notes_of(experiment.task),
            privacy=privacy_spent(experiment.privacy, lines()) if experiment.privacy.on else None,
            **self.staleness.summary_fields(),
        )
        return Result(summary, evaluations, weights, named, self.folder)

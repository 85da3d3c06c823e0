"""A run from its first dispatch to its summary, and on again after it was stopped."""

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
from fedecho.runs.config import ConfigError, fingerprint, from_config
from fedecho.runs.evaluation import Judge, TimedTransport
from fedecho.runs.execution import DeviceName, Execution, ExecutorName, as_before, check_same_arithmetic
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import check_folder, owned, restored, resumable, summary_of, write_end
from fedecho.runs.identity import check_inputs, check_software, config_of, header_of, name_of, note_software, notes_of
from fedecho.runs.privacy_budget import check_accountant, spent
from fedecho.runs.record import RECORD, Line, Mark, Record, arrivals_digest, noting, read_header
from fedecho.runs.run_stats import Standstill, Tally, Watch
from fedecho.runs.signals import stop_signals
from fedecho.runs.summary import Summary
from fedecho.storage.checkpoint import save_checkpoint
from fedecho.storage.files import DiskFullError

CHECKPOINT_S = 30.0
NOWHERE = Mark(0, None)
STAY = "leave the executor out to go on where it was, or start in another folder"


class Interrupted(Exception):  # noqa: N818 (no error)
    """The run was stopped on request; what it had done is in its folder."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    summary: Summary
    evaluations: list[Line]
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
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run an experiment on the virtual clock. With ``out``, everything is recorded there and can be resumed.

    The result is the same, to the last bit, for ``serial``, ``pool`` and ``ray``, any number of workers, and after any number of
    stops. ``cuda`` has the same schedule and draws and rounds in its own way; ``deterministic`` makes it do so equally every time.
    With ``device="cuda"`` the workers of a pool, or of the Ray cluster at ``address``, have a GPU each. A run that other software
    began is refused, unless ``other_software`` allows it.
    """
    folder = None if out is None else Path(out)
    refuse_while_importing()
    if experiment.privacy.on:
        check_accountant()
    if not checkpoint_s >= 0:
        raise ConfigError(f"--checkpoint-every must be at least 0 seconds, got {checkpoint_s}")
    how: Any = {"precision": precision, "deterministic": deterministic, "device": device, "address": address}
    execution = Execution(executor=executor, workers=workers, other_software=other_software, **how)
    with ExitStack() as stack:
        if folder is not None:
            check_folder(folder, experiment, resume)
            stack.enter_context(owned(folder, say))
            check_folder(folder, experiment, resume)  # again: a moment ago it may have been somebody else's
            if resume:
                check_same_arithmetic(folder, read_header(folder)["execution"], execution, STAY)
                check_software(folder, other_software)
        stack.enter_context(one_thread())
        simulation = stack.enter_context(assembled(experiment, execution, say))
        stop = stack.enter_context(stop_signals(say))
        run = _Run(simulation, folder, checkpoint_s, watch or (lambda moment, scores: None), stop)
        return run.through(resume, say)


def resume(folder: Path | str, experiment: Experiment | None = None, **options: Any) -> Result:
    """Go on with the run in ``folder``. Its own record says what it is; a user's own task or method must be given again.

    One that was on a GPU goes on there, in the same precision; any other on this process's CPU, unless ``options`` say otherwise.
    """
    folder = Path(folder)
    header = resumable(folder)
    if experiment is None:
        if header["config"] is None:
            raise ConfigError(f"{folder} used a task or method of its own: resume it from Python, resume(folder, experiment)")
        experiment = from_config(header["config"])
    if "device" in header["execution"]:
        options = as_before(header["execution"], options.get("executor")) | options
    return simulate(experiment, out=folder, resume=True, **options)


class _Run:
    """The pieces of one run while it goes on."""

    def __init__(
        self, simulation: Simulation, folder: Path | None, checkpoint_s: float, watch: Watch, stop: Callable[[], bool]
    ) -> None:
        self.simulation = simulation
        self.folder = folder
        self.checkpoint_s = checkpoint_s
        self.watch = watch
        self.stop = stop
        self.config = config_of(simulation.experiment)
        self.stopwatch = TimedTransport(simulation.transport)
        self.num_moments = 0
        self.real_before = self.save_cost_s = 0.0
        self.standstill = Standstill(simulation.experiment)
        # Without a folder nothing could be made up for later.
        self.judge = Judge(simulation, watch, stop if folder is not None else lambda: False)
        self.tally = Tally()
        self.began = self.saved_at = time.perf_counter()

    @property
    def real_s(self) -> float:
        return self.real_before + time.perf_counter() - self.began

    @property
    def _pause_s(self) -> float:
        """Between two checkpoints: as asked, but never so often that they take more than a twentieth of the time."""
        return max(self.checkpoint_s, 20 * self.save_cost_s) if self.checkpoint_s else 0.0

    def through(self, resume: bool, say: Callable[[str], None]) -> Result:
        """From where it stands to its end. A full disk stops it between two whole checkpoints."""
        try:
            self.open(resume, say)
            try:
                return self.finish()
            finally:
                self.record.close()
        except DiskFullError as error:
            begun = self.folder is not None and (self.folder / RECORD).exists()
            error.advice = f"free some space, then {f'go on with: {self._how_to_resume}' if begun else 'start it again'}"
            raise

    def open(self, resume: bool, say: Callable[[str], None]) -> None:
        runtimes, execution = self.simulation.runtimes, self.simulation.execution
        every = self.simulation.experiment.record_every or 1
        if self.folder is None:
            self.record = Record.in_memory(runtimes, every)
        elif resume:
            header = read_header(self.folder)
            self.config = header["config"]  # as its checkpoints know it: a fedecho of before had fewer settings
            execution.check_same_kernels(self.folder, header["execution"])
            check_inputs(self.folder, header.get("inputs") or {}, self.simulation.inputs)
            mark = restored(self.folder, self.simulation.server, self._state(NOWHERE), self._take, say)
            if mark is None:
                say(f"there is no checkpoint in {self.folder} yet: the run begins anew")
            self.record = Record.continued(self.folder, runtimes, mark, every)
            note_software(self.record, self.folder, say)
            if self.tally.accepted < self.simulation.server.counts["accepted"]:  # a checkpoint from before there were tallies
                self.tally = Tally.of(self.record.lines())
        else:
            beginning = header_of(self.simulation, self.config, execution.described())
            self.record = Record.new(self.folder, runtimes, beginning, every)

    def finish(self) -> Result:
        experiment, server = self.simulation.experiment, self.simulation.server
        if self.judge.broken_off:
            now = self.simulation.transport.now
            self.judge.made_up(server.model.version, now, self._evaluate(server.model.version, now))
        if not self.judge.broken_off and server.model.version < experiment.num_versions:
            drive(
                server,
                self.stopwatch,
                num_versions=experiment.num_versions,
                dispatch_after_step=experiment.dispatch_after_step,
                watch=self._moment,
            )
        if server.model.version < experiment.num_versions or self.judge.broken_off:
            self._save()
            how = "" if self.folder is None else f"; go on with: {self._how_to_resume}"
            raise Interrupted(f"stopped at version {server.model.version} of {experiment.num_versions}{how}")
        return self._result()

    def _moment(self, moment: Moment) -> bool:
        self.stopwatch.served()
        self.num_moments += 1
        self.record.moment(moment)
        self.standstill.see(moment.receipt)
        self.tally.see(moment.receipt)
        version = None if moment.step is None else moment.step.model.version
        scores = self._evaluate(version, moment.time) if version is not None and self.judge.is_due(version) else None
        self.watch(moment, scores)
        if self.stop():
            return True
        if self.folder is not None and time.perf_counter() - self.saved_at >= self._pause_s:
            self._save()
        return False

    def _evaluate(self, version: int, now: float) -> dict[str, float] | None:
        scores = self.judge.scores()
        if scores is not None:
            costs = self.stopwatch.costs() | {"versions_alive": self.simulation.server.versions.num_alive}
            self.record.evaluation(version, now, scores, {"real_s": round(self.real_s, 3), **costs})
        return scores

    def _save(self) -> None:
        if self.folder is None:
            return
        began = time.perf_counter()
        save_checkpoint(self.folder, self.num_moments, self._state(self.record.sync()))
        self.saved_at = time.perf_counter()
        self.save_cost_s = self.saved_at - began

    def _state(self, mark: Mark) -> dict[str, Any]:
        """All that a run goes on from, with its record up to ``mark``."""
        return {
            "fingerprint": self._fingerprint,
            "server": self.simulation.server.snapshot(),
            "transport": self.simulation.transport.snapshot(),
            "position": mark.position,
            "record_sha256": mark.sha256,
            "record_others": mark.others,
            "tally": self.tally.to_tree(),
            "real_s": self.real_s,
            "spent": self.stopwatch.spent(),
            "num_moments": self.num_moments,
            "refused": self.standstill.refused,
            "not_finite": self.standstill.not_finite,
            "fruitless": self.standstill.fruitless,
            "to_judge": self.judge.broken_off,
        }

    def _take(self, tree: Mapping[str, Any]) -> None:
        """Become the run that a checkpoint was made of. One of before lacks some things."""
        self.simulation.server.restore(tree["server"])
        self.simulation.transport.restore(tree["transport"], tree["server"]["models"])
        self.real_before, self.num_moments = tree["real_s"], tree["num_moments"]
        self.stopwatch.go_on(tree.get("spent", {}))
        self.standstill.refused, self.standstill.fruitless = tree["refused"], tree["fruitless"]
        self.standstill.not_finite = tree.get("not_finite", 0)
        self.judge.broken_off = tree.get("to_judge", False)
        self.tally = Tally().from_tree(tree.get("tally", self.tally.to_tree()))

    @property
    def _how_to_resume(self) -> str:
        known = self.config is not None
        return f"fedecho resume {self.folder}" if known else f'fedecho.resume("{self.folder}", experiment) in Python'

    @property
    def _fingerprint(self) -> str:
        return "" if self.config is None else fingerprint(self.config)

    def _result(self) -> Result:
        simulation, server = self.simulation, self.simulation.server
        experiment, named = simulation.experiment, simulation.named(server.model.weights)
        evaluations: list[Line] = []
        arrivals_sha256 = arrivals_digest(noting(self.record.lines(), evaluations))
        summary = summary_of(
            server,
            evaluations,
            name=experiment.name,
            algorithm=name_of(experiment.algorithm),
            seed=experiment.seed,
            virtual_s=simulation.transport.now,
            real_s=round(self.real_s, 3),
            arrivals_sha256=arrivals_sha256,
            notes=notes_of(experiment.task),
            privacy=spent(experiment.privacy, self.record.lines()) if experiment.privacy.on else None,
            record_every=experiment.record_every or 1,
            **self.tally.staleness(),
        )
        if self.folder is not None:
            write_end(self.folder, self.record, named, summary)
        return Result(summary, evaluations, server.model.weights, named, self.folder)

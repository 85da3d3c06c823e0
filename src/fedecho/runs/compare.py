"""Comparisons of several methods: shared settings, parallel runs, and resume of stopped runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedecho.runs.config import ConfigError, UnknownKeyError, load
from fedecho.runs.execution import Execution, check_same_arithmetic
from fedecho.runs.experiment import Experiment
from fedecho.runs.identity import check_same, config_of
from fedecho.runs.job_processes import Report, Say, See, run_jobs
from fedecho.runs.record import RECORD, read_header
from fedecho.runs.run import simulate
from fedecho.runs.run_stats import DivergedError, ProgressWatch, RunState
from fedecho.runs.settings import setting_of, shown
from fedecho.runs.signals import Stop
from fedecho.runs.software import check_software
from fedecho.runs.summary import Summary, is_finished
from fedecho.storage.files import write_atomically
from fedecho.storage.user_files import MIB, read_bytes
from fedecho.tracking import tracked

RUN_OPTIONS = {"seed": "--seeds", "algorithm.name": "--algorithms"}
"""The settings in which the runs of a comparison differ, and the option that sets each."""


def settings_of_methods(source: str, methods: Sequence[str], settings: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the settings that apply to each method. A setting that applies to none of them is an error."""
    _check_not_per_run(settings)
    unknown: dict[str, list[UnknownKeyError]] = {}
    accepted = {method: _accepted(source, method, settings, unknown) for method in methods}
    for setting, errors in unknown.items():
        if len(errors) == len(methods):
            error = next((each for each in errors if "did you mean" in str(each)), errors[0])
            raise ConfigError(f"--set {shown(setting)[1:-1]}: none of {', '.join(methods)} has it; {error}")
    return accepted


def method_specific_settings(accepted: dict[str, tuple[str, ...]], settings: Sequence[str]) -> list[str]:
    """One line for each setting that applies to some methods only."""
    lines = []
    for setting in dict.fromkeys(settings):
        methods = [method for method, own in accepted.items() if setting in own]
        others = [method for method in accepted if method not in methods]
        if others:
            lines.append(f"--set {setting} applies to {', '.join(methods)} only; not a setting of {', '.join(others)}")
    return lines


def _accepted(source: str, method: str, settings: Sequence[str], unknown: dict[str, list[UnknownKeyError]]) -> tuple[str, ...]:
    load(source, algorithm=method)  # an error without any settings is not caused by them
    accepted = tuple(settings)
    while True:
        try:
            load(source, algorithm=method, settings=accepted)
            return accepted
        except UnknownKeyError as error:
            rejected = [setting for setting in accepted if _within(_key(setting), error.key)]
            elsewhere = error.below is not None and not any(_within(_key(setting), error.below) for setting in accepted)
            if not error.key.startswith("algorithm."):
                raise
            if not rejected or elsewhere:
                raise ConfigError(f"{method}: {error}") from None
            for setting in dict.fromkeys(rejected):
                unknown.setdefault(setting, []).append(error)
            accepted = tuple(setting for setting in accepted if setting not in rejected)
        except ValueError as error:
            raise ConfigError(f"{method}: {error}") from None


def _check_not_per_run(settings: Sequence[str]) -> None:
    for setting in settings:
        table = setting_of(setting)
        algorithm = table.get("algorithm")
        given = "seed" if "seed" in table else "algorithm.name" if isinstance(algorithm, dict) and "name" in algorithm else ""
        if given:
            raise ConfigError(f"--set {given}=... would make all runs the same: use {RUN_OPTIONS[given]} instead")


def _key(setting: str) -> str:
    return ".".join(part.strip() for part in setting.partition("=")[0].split("."))


def _within(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


DIVERGED = "diverged.txt"


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    label: str
    experiment: Experiment
    folder: Path
    track: tuple[str, ...] = ()
    execution: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for ``simulate``: the executor and its options."""

    @property
    def why_diverged(self) -> str:
        """Why an earlier attempt was aborted, or empty. It is not retried, because it would diverge again."""
        path = self.folder / DIVERGED
        return read_bytes(path, MIB).decode(errors="replace").strip() if path.exists() else ""


@dataclass(frozen=True)
class ComparisonResult:
    """The results of a comparison. ``diverged`` maps the label of each aborted run to the reason."""

    summaries: list[Summary]
    diverged: dict[str, str]


def run_all(plan: list[PlannedRun], *, jobs: int, see: See, say: Say = lambda text: None) -> ComparisonResult:
    """Run all unfinished runs, ``jobs`` at a time. A run that diverges does not stop the others.

    ``see`` receives the state of each run, ``say`` its messages.
    """
    for planned in plan:
        if (planned.folder / RECORD).exists():
            check_same(planned.folder, planned.experiment)
            check_same_arithmetic(planned.folder, read_header(planned.folder)["execution"], Execution(**planned.execution))
    missing = [planned for planned in plan if not is_finished(planned.folder) and not planned.why_diverged]
    for planned in missing:
        if (planned.folder / RECORD).exists():
            check_software(planned.folder, planned.execution.get("other_software", False))
    if missing:
        run_jobs({planned.label: partial(_run_one, planned) for planned in missing}, jobs=jobs, see=see, say=say)
    diverged = {planned.label: why for planned in plan if (why := planned.why_diverged)}
    return ComparisonResult([Summary.read(planned.folder) for planned in plan if planned.label not in diverged], diverged)


def _run_one(planned: PlannedRun, report: Report, say: Say, stop: Stop) -> None:
    with tracked(planned.track, planned.folder, config_of(planned.experiment), say) as tracker:
        watch = ProgressWatch(planned.folder, RunState(planned.experiment.num_versions), report, also=tracker)
        begun = (planned.folder / RECORD).exists()
        try:
            simulate(planned.experiment, out=planned.folder, resume=begun, watch=watch, stop=stop, say=say, **planned.execution)
        except DivergedError as error:
            write_atomically(planned.folder / DIVERGED, f"{error}\n".encode())

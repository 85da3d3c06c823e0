"""Several runs side by side: settings shared by methods, finished runs kept, stopped runs resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedecho.runs.config import ConfigError, UnknownKeyError, load
from fedecho.runs.execution import Execution, check_same_arithmetic
from fedecho.runs.experiment import Experiment
from fedecho.runs.identity import check_same, check_software, config_of, is_finished
from fedecho.runs.job_processes import Say, See, Tell, beside
from fedecho.runs.record import RECORD, read_header
from fedecho.runs.run import simulate
from fedecho.runs.run_stats import DivergedError, Following, RunState
from fedecho.runs.settings import setting_of, shown
from fedecho.runs.summary import Summary
from fedecho.storage.checkpoint import write_atomically
from fedecho.storage.user_files import MIB, read_bytes
from fedecho.tracking import tracked

OWN = {"seed": "--seeds", "algorithm.name": "--algorithms"}
"""What tells the runs of a comparison apart, and the option that says it."""


def settings_of_methods(source: str, methods: Sequence[str], settings: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The settings that each method takes. An error names the method; a key that none of them has names them all."""
    _check_own(settings)
    unknown: dict[str, list[UnknownKeyError]] = {}
    taken = {method: _taken(source, method, settings, unknown) for method in methods}
    for setting, errors in unknown.items():
        if len(errors) == len(methods):
            error = next((each for each in errors if "did you mean" in str(each)), errors[0])
            raise ConfigError(f"--set {shown(setting)[1:-1]}: none of {', '.join(methods)} has it; {error}")
    return taken


def shares(taken: dict[str, tuple[str, ...]], settings: Sequence[str]) -> list[str]:
    """A line for each setting that some methods take and others do not have."""
    lines = []
    for setting in dict.fromkeys(settings):
        takers = [method for method, found in taken.items() if setting in found]
        others = [method for method in taken if method not in takers]
        if others:
            lines.append(f"--set {setting} is for {', '.join(takers)} alone; {', '.join(others)} has no such setting")
    return lines


def _taken(source: str, method: str, settings: Sequence[str], unknown: dict[str, list[UnknownKeyError]]) -> tuple[str, ...]:
    load(source, algorithm=method)  # what is wrong without any setting is nothing of the method's
    mine = tuple(settings)
    while True:
        try:
            load(source, algorithm=method, settings=mine)
            return mine
        except UnknownKeyError as error:
            lacked = [setting for setting in mine if _within(_key(setting), error.key)]
            elsewhere = error.below is not None and not any(_within(_key(setting), error.below) for setting in mine)
            if not error.key.startswith("algorithm."):
                raise
            if not lacked or elsewhere:
                raise ConfigError(f"{method}: {error}") from None
            for setting in dict.fromkeys(lacked):
                unknown.setdefault(setting, []).append(error)
            mine = tuple(setting for setting in mine if setting not in lacked)
        except ValueError as error:
            raise ConfigError(f"{method}: {error}") from None


def _check_own(settings: Sequence[str]) -> None:
    for setting in settings:
        table = setting_of(setting)
        algorithm = table.get("algorithm")
        given = "seed" if "seed" in table else "algorithm.name" if isinstance(algorithm, dict) and "name" in algorithm else ""
        if given:
            raise ConfigError(f"--set {given}=... would make all runs the same: give {OWN[given]}")


def _key(setting: str) -> str:
    return ".".join(part.strip() for part in setting.partition("=")[0].split("."))


def _within(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


DIVERGED = "diverged.txt"


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    label: str
    experiment: Experiment
    folder: Path
    track: tuple[str, ...] = ()
    execution: Mapping[str, Any] = field(default_factory=dict)
    """How it is computed, in the words of ``simulate``."""

    @property
    def why_diverged(self) -> str:
        """Why it was given up, or empty. Tried again it would only do the same."""
        kept = self.folder / DIVERGED
        return read_bytes(kept, MIB).decode(errors="replace").strip() if kept.exists() else ""


@dataclass(frozen=True)
class Compared:
    """What came of the runs; ``diverged`` says by its label why one was given up."""

    summaries: list[Summary]
    diverged: dict[str, str]


def run_all(plan: list[Planned], *, jobs: int, see: See, say: Say = lambda text: None) -> Compared:
    """Run what is missing, ``jobs`` at a time; one that diverges does not end the others.

    ``see`` is told how each run stands, ``say`` what it has to say.
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
        beside({planned.label: partial(_run_one, planned) for planned in missing}, jobs=jobs, see=see, say=say)
    diverged = {planned.label: why for planned in plan if (why := planned.why_diverged)}
    return Compared([Summary.read(planned.folder) for planned in plan if planned.label not in diverged], diverged)


def _run_one(planned: Planned, tell: Tell, say: Say) -> None:
    with tracked(planned.track, planned.folder, config_of(planned.experiment), say) as tracker:
        watch = Following(planned.folder, RunState(planned.experiment.num_versions), tell, also=tracker)
        begun = (planned.folder / RECORD).exists()
        try:
            simulate(planned.experiment, out=planned.folder, resume=begun, watch=watch, say=say, **planned.execution)
        except DivergedError as error:
            write_atomically(planned.folder / DIVERGED, f"{error}\n".encode())

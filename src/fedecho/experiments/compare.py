"""Many runs beside each other: one process each, finished ones kept, stopped ones resumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedecho.core.checkpoint import write_atomically
from fedecho.core.user_files import MIB, read_bytes
from fedecho.experiments.beside import See, beside
from fedecho.experiments.execution import Execution, check_same_arithmetic
from fedecho.experiments.experiment import Experiment
from fedecho.experiments.identity import check_same, config_of, is_finished
from fedecho.experiments.led import Say, Tell
from fedecho.experiments.record import RECORD, read_header
from fedecho.experiments.run import simulate
from fedecho.experiments.software import check_software
from fedecho.experiments.standstill import DivergedError
from fedecho.experiments.state import Following, RunState
from fedecho.experiments.summary import Summary
from fedecho.tracking import tracked

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

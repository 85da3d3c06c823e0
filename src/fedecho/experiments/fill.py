"""Filling a table: its missing cells, one after another or several at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedecho.experiments.beside import Say, See, Tell, beside
from fedecho.experiments.folder import FolderInUse
from fedecho.experiments.paper import Cell
from fedecho.experiments.results import read_result, run_cell, run_folder
from fedecho.experiments.run import CHECKPOINT_S
from fedecho.experiments.shortage import shortage
from fedecho.experiments.state import Following, RunState


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Where results are kept and runs are, and how they are computed, in the words of ``simulate``."""

    results: Path
    runs: Path
    options: dict[str, Any]
    checkpoint_s: float = CHECKPOINT_S

    def run(self, cell: Cell, tell: Tell, say: Say) -> None:
        """What another process has taken is its own."""
        if read_result(self.results, cell) is not None:
            return
        watch = Following(run_folder(self.runs, cell), RunState(cell.experiment().num_versions), tell)
        try:
            run_cell(cell, **vars(self), watch=watch, say=say)
        except FolderInUse as error:
            say(f"passed over: {error}")

    def try_to_run(self, cell: Cell, tell: Tell, say: Say) -> bool:
        """Did it come to its end? Memory, above all, is short for one cell because others run."""
        try:
            self.run(cell, tell, say)
        except (ValueError, MemoryError, RuntimeError) as error:
            if not isinstance(error, ValueError) and not shortage(error):
                raise
            say(shortage(error) or str(error))
            return False
        return True


def fill(filling: Filling, cells: Sequence[Cell], *, jobs: int, see: See, say: Say) -> list[str]:
    """Run the cells, ``jobs`` at a time, in a process each if that is more than one. Returned are those that failed.

    One after another, the first that fails ends it with its error. Several at once do not end each other.
    """
    if jobs == 1:
        for cell in cells:
            filling.run(cell, partial(see, cell.slug), partial(_by_name, say, cell.slug))
        return []
    works = {cell.slug: partial(filling.try_to_run, cell) for cell in cells}
    return [name for name, well in beside(works, jobs=jobs, see=see, say=say).items() if not well]


def _by_name(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")

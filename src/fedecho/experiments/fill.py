"""Filling a table: its missing cells, one after another or several at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedecho.experiments.beside import See, beside
from fedecho.experiments.folder import FolderInUse
from fedecho.experiments.led import Say, Tell
from fedecho.experiments.paper import Cell
from fedecho.experiments.results import read_result, run_cell, run_folder
from fedecho.experiments.run import CHECKPOINT_S
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


def fill(filling: Filling, cells: Sequence[Cell], *, jobs: int, see: See, say: Say) -> None:
    """Run the cells, one after another here, or several at a time in processes of their own."""
    if jobs == 1:
        for cell in cells:
            filling.run(cell, partial(see, cell.slug), partial(_by_name, say, cell.slug))
    elif cells:
        beside({cell.slug: partial(filling.run, cell) for cell in cells}, jobs=jobs, see=see, say=say)


def _by_name(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")

"""A run serves every table that it belongs in: cells that are the same experiment share one result."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from fedecho.experiments.experiment import Experiment
from fedecho.experiments.paper import TABLES as VISION_TABLES
from fedecho.experiments.paper import Cell
from fedecho.experiments.paper_text import TABLES as TEXT_TABLES

TABLES = VISION_TABLES | TEXT_TABLES


@cache
def first_of(cell: Cell) -> Cell:
    """The first cell in the order of the tables that is the same experiment; under its name the result is kept.

    In a model that is not trained there is nothing random: that of seed 0 is that of all.
    """
    cell = replace(cell, seed=0) if cell.row.untrained else cell
    return next((other for other in _alike(cell) if _same(other, cell)), cell)


def _alike(cell: Cell) -> Iterator[Cell]:
    """Those that may be: of the same recipe, method and seed."""
    for table in TABLES.values():
        for other in replace(table, own=cell.own).cells((cell.seed,)):
            if (other.recipe, other.row.algorithm, other.row.untrained) == (
                cell.recipe,
                cell.row.algorithm,
                cell.row.untrained,
            ):
                yield other


def _same(one: Cell, two: Cell) -> bool:
    ours, theirs = _experiment(one), _experiment(two)
    # Of a model that is not trained it does not matter how it would be.
    return ours.task == theirs.task if one.row.untrained else ours == theirs


@cache
def _experiment(cell: Cell) -> Experiment:
    return cell.experiment()

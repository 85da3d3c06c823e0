"""A paper's table with ours beside it: as text, Markdown or CSV."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedecho.experiments.paper import Cell, Column, PaperTable, Row
from fedecho.experiments.results import CellResult, read_result


@dataclass(frozen=True)
class Figure:
    """What one cell says: ours over the seeds that have run, and the paper's."""

    ours: str
    paper: str
    seeds: int


def figure_of(table: PaperTable, row: Row, column: Column, results: Path, seeds: tuple[int, ...]) -> Figure:
    found = finished(table, row, column, results, seeds)
    values = [100 * result.accuracy for result in found]
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    paper = table.values.get((row.label, column.label))
    return Figure(
        ours=f"{fmean(values):.2f}{spread}" if values else "",
        paper=f"{paper[0]:.2f} ± {paper[1]:.2f}" if paper else "",
        seeds=len(values),
    )


def finished(table: PaperTable, row: Row, column: Column, results: Path, seeds: tuple[int, ...]) -> list[CellResult]:
    cells = (Cell(table.name, row, column, seed, table.recipe) for seed in seeds)
    return [result for cell in cells if (result := read_result(results, cell)) is not None]


def lines_of(table: PaperTable, results: Path, seeds: tuple[int, ...]) -> list[list[str]]:
    """The heading, then a line per row: its label, and for each column ours, the number of seeds, and the paper's."""
    heading = ["method"]
    for column in table.columns:
        heading += [f"{column.label}: ours", "seeds", "paper"]
    lines = [heading]
    for row in table.rows:
        line = [row.label]
        for column in table.columns:
            figure = figure_of(table, row, column, results, seeds)
            line += [figure.ours, str(figure.seeds) if figure.seeds else "", figure.paper]
        lines.append(line)
    return lines


def as_markdown(lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def as_csv(lines: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().rstrip("\n")


def as_text(table: PaperTable, results: Path, seeds: tuple[int, ...]) -> Iterator[Table]:
    """A small table for each column: they are read one below the other."""
    for column in table.columns:
        shown = Table(title=f"{table.title}: {column.label}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("method", "ours", "seeds", "paper"):
            shown.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        for row in table.rows:
            figure = figure_of(table, row, column, results, seeds)
            shown.add_row(row.label, figure.ours, str(figure.seeds or ""), figure.paper)
        yield shown


def notes_of(table: PaperTable, results: Path, seeds: tuple[int, ...]) -> list[str]:
    """What stands beside the numbers: hardware, software, and every file that took the place of a set."""
    found = [
        result for row in table.rows for column in table.columns for result in finished(table, row, column, results, seeds)
    ]
    if not found:
        return ["nothing of this table has run yet"]
    notes = sorted({f"{result.execution.get('device', 'CPU')}, torch {result.software['torch']}" for result in found})
    notes += sorted({f"U: {result.unlabeled}" for result in found if "in place of" in result.unlabeled})
    return [
        "accuracy in %, mean of a run's last ten evaluations, mean ± deviation over seeds; an empty cell has not run",
        *notes,
    ]

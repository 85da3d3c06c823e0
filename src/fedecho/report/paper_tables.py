"""A paper's table with ours beside it: as text, Markdown or CSV."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedecho.experiments.config import load
from fedecho.experiments.paper import Column, PaperTable, Row
from fedecho.experiments.results import CellResult, read_result

OWN = "the paper's own"


@dataclass
class Marks:
    """Numbers for what would be said in every row."""

    known: dict[str, str] = field(default_factory=dict)

    def of(self, text: str) -> str:
        return text if text == OWN else self.known.setdefault(text, f"[{len(self.known) + 1}]")

    def told(self) -> str:
        return "\n".join(f"{mark} {text}" for text, mark in self.known.items())


@dataclass(frozen=True)
class Figure:
    """What one cell says: ours over the seeds that have run, and the paper's."""

    ours: str
    paper: str
    seeds: int
    scores: tuple[str, ...] = ()
    stand_ins: tuple[tuple[str, ...], ...] = ()
    """All in which its runs are not the paper's, for each kind of run."""

    def beside(self, table: PaperTable, marks: Marks | None = None) -> list[str]:
        """The cells of a row, as ``headings_of`` names them; with ``marks``, stand-ins are told by their numbers."""
        told = ["; ".join(each) if marks is None else " ".join(map(marks.of, each)) for each in self.stand_ins]
        stand_in = [" or ".join(told)] if table.names_stand_ins else []
        return [self.ours, *self.scores, str(self.seeds or ""), self.paper, *stand_in]


def headings_of(table: PaperTable) -> list[str]:
    stand_in = ["ran on"] if table.names_stand_ins else []
    return ["ours", *(heading for _, heading in table.scores), "seeds", "paper", *stand_in]


def figure_of(table: PaperTable, row: Row, column: Column, results: Path, seeds: tuple[int, ...]) -> Figure:
    ended = finished(table, row, column, results, seeds)
    found = [result for result in ended if not result.diverged]
    paper = table.values.get((row.label, column.label))
    return Figure(
        ours=_ours([100 * result.accuracy for result in found], len(ended) - len(found)),
        paper=_said(*paper) if paper else "",
        seeds=len(ended),
        scores=tuple(_mean_score(found, name) for name, _ in table.scores),
        stand_ins=tuple(sorted({_ran_on(table, row, result) for result in ended})) if table.names_stand_ins else (),
    )


def _ours(values: list[float], diverged: int) -> str:
    """Runs that diverged have no accuracy to take a mean of; how many there are is said."""
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    mean = f"{fmean(values):.2f}{spread}" if values else ""
    return mean if not diverged else f"{mean} ({diverged} diverged)" if values else "diverged"


def _ran_on(table: PaperTable, row: Row, result: CellResult) -> tuple[str, ...]:
    """All in which a run is not the paper's: what its task stood in for, its number of versions and its local learning rate."""
    paper = load(table.recipe, algorithm=row.algorithm)
    versions, client_lr = result.config["num_versions"], result.config["local"]["client_lr"]
    told = result.stand_in.split("; ") if result.stand_in else []
    if not row.untrained:
        told += [] if versions == paper.num_versions else [f"{versions} versions in place of {paper.num_versions}"]
        told += [] if client_lr == paper.local.client_lr else [f"client_lr {client_lr:g} in place of {paper.local.client_lr:g}"]
    return tuple(told) or (OWN,)


def _said(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _mean_score(found: list[CellResult], name: str) -> str:
    """The mean over seeds, each of the same evaluations as its accuracy; shares in %, losses as they are."""
    scores = [result.score(name) for result in found]
    known = [score for score in scores if score is not None]
    last = " (last)" if any(score.only_last for score in known) else ""
    if not known:
        return ""
    mean = fmean(score.value for score in known)
    return f"{mean:.3f}{last}" if "loss" in name else f"{100 * mean:.2f}{last}"


def finished(table: PaperTable, row: Row, column: Column, results: Path, seeds: tuple[int, ...]) -> list[CellResult]:
    cells = (table.cell(row, column, seed) for seed in (seeds[:1] if row.untrained else seeds))
    return [result for cell in cells if (result := read_result(results, cell)) is not None]


def lines_of(table: PaperTable, results: Path, seeds: tuple[int, ...]) -> list[list[str]]:
    """The heading, then a line per row: its label, and for each column ours, the number of seeds, and the paper's."""
    heading = ["method"]
    for column in table.columns:
        first, *others = headings_of(table)
        heading += [f"{column.label}: {first}", *others]
    lines = [heading]
    for row in table.rows:
        line = [row.label]
        for column in table.columns:
            line += figure_of(table, row, column, results, seeds).beside(table)
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
        title = f"{table.title}: {column.label}"
        shown = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("method", *headings_of(table)):
            words = heading in ("method", "ran on")  # where a terminal is narrow, words are folded and figures are whole
            shown.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
        marks = Marks()
        for row in table.rows:
            shown.add_row(row.label, *figure_of(table, row, column, results, seeds).beside(table, marks))
        shown.caption = Text(f"{marks.told()}\n") if marks.known else None
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
    for key in ("trained", "judged on", "prompt"):
        notes += sorted({f"{key}: {result.notes[key]!r}" for result in found if key in result.notes})
    return [
        "accuracy in %, mean of a run's last ten evaluations (scores too), mean ± deviation over seeds; an empty cell has not run",
        *notes,
    ]

"""The paper's tables with our results beside them, as text, Markdown and CSV."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedecho.paper.results import CellResult, read_result
from fedecho.paper.tables import Column, PaperTable, Row
from fedecho.runs.config import from_config, load, to_config

OWN = "the paper's own"


@dataclass
class Marks:
    """Numbers for what would be said in every row."""

    known: dict[str, int] = field(default_factory=dict)

    def of(self, texts: tuple[str, ...]) -> str:
        if texts == (OWN,):
            return OWN
        return f"[{' '.join(str(self.known.setdefault(text, len(self.known) + 1)) for text in texts)}]"

    def told(self, between: str) -> str:
        return between.join(f"[{mark}] {text}" for text, mark in self.known.items())


@dataclass(frozen=True)
class View:
    """A table as it is to be shown: the results it is made of, the seeds, and whether each of these has a column."""

    table: PaperTable
    results: Path
    seeds: tuple[int, ...]
    by_seed: bool = False

    @property
    def headings(self) -> list[str]:
        """Of one column of the paper's; the cells of a ``Figure`` stand below them."""
        seeds = [f"seed {seed}" for seed in self.seeds] if self.by_seed else ["seeds"]
        last = "ran on" if self.table.names_stand_ins else "gap"
        return ["ours", *seeds, *(heading for _, heading in self.table.scores), "paper", last]

    def finished(self, row: Row, column: Column) -> dict[int, CellResult]:
        """What has run of a cell, by seed; of a model that is not trained, the one that is that of all."""
        cells = {seed: self.table.cell(row, column, seed) for seed in (self.seeds[:1] if row.untrained else self.seeds)}
        found = {seed: read_result(self.results, cell) for seed, cell in cells.items()}
        return {seed: result for seed, result in found.items() if result is not None}

    def all_finished(self) -> Iterator[CellResult]:
        for row in self.table.rows:
            for column in self.table.columns:
                yield from self.finished(row, column).values()

    def rows(self, *columns: Column) -> list[tuple[Row, list["Figure"]]]:
        """What is shown of these columns: not the rows of our own of which nothing has run there, unless that is all."""
        every = [(row, [self.figure(row, column) for column in columns]) for row in self.table.rows]
        shown = [(row, figures) for row, figures in every if not row.control or any(figure.ours for figure in figures)]
        return shown or every

    def figure(self, row: Row, column: Column) -> "Figure":
        ended = self.finished(row, column)
        trained = [result for result in ended.values() if not result.diverged]
        paper = self.table.values.get((row.label, column.label))
        alone = tuple(_ours([ended[seed]]) if seed in ended else "" for seed in self.seeds)
        return Figure(
            ours=_ours(ended.values()),
            seeds=alone if self.by_seed else (str(len(ended) or ""),),
            scores=tuple(_mean_score(trained, name) for name, _ in self.table.scores),
            paper=_said(*paper) if paper else "",
            gap=_gap_text(gap_of(trained, paper)),
            stand_ins=self.stand_ins(row, ended.values()) if self.table.names_stand_ins else None,
        )

    def stand_ins(self, row: Row, ended: Iterable[CellResult]) -> tuple[tuple[str, ...], ...]:
        """All in which these runs are not the paper's, for each kind of run."""
        return tuple(sorted({_ran_on(self.table, row, result) for result in ended}))


@dataclass(frozen=True)
class Figure:
    """What is shown of a cell: ours over the seeds that have run, and the paper's."""

    ours: str
    seeds: tuple[str, ...]
    """Each seed's, or how many there are."""
    scores: tuple[str, ...]
    paper: str
    gap: str
    """Ours minus the paper's. It has no meaning where another model stands in for the paper's: there stand-ins are shown."""
    stand_ins: tuple[tuple[str, ...], ...] | None
    """All in which its runs are not the paper's, for each kind of run; None in a table that does not tell."""

    def cells(self, marks: Marks) -> list[str]:
        """As ``View.headings`` names them; stand-ins are told by their numbers."""
        last = self.gap if self.stand_ins is None else " or ".join(map(marks.of, self.stand_ins))
        return [self.ours, *self.seeds, *self.scores, self.paper, last]


def accuracies(results: Iterable[CellResult]) -> list[float]:
    """In %; a run that diverged has none."""
    return [100 * result.accuracy for result in results if not result.diverged]


def gap_of(trained: Iterable[CellResult], paper: tuple[float, float | None] | None) -> tuple[float | None, float | None]:
    """Our mean minus the paper's, in points and in the paper's deviations."""
    values = accuracies(trained)
    if not values or paper is None:
        return None, None
    points = fmean(values) - paper[0]
    return points, abs(points) / paper[1] if paper[1] else None


def _gap_text(gap: tuple[float | None, float | None]) -> str:
    points, deviations = gap
    if points is None:
        return ""
    return f"{points:+.1f}" if deviations is None else f"{points:+.1f} ({deviations:.1f})"


def _ours(results: Iterable[CellResult]) -> str:
    """Runs that diverged have no accuracy to take a mean of; how many there are is said."""
    ended = list(results)
    values = accuracies(ended)
    if not values:
        return "diverged" if ended else ""
    diverged = f" ({len(ended) - len(values)} diverged)" if len(values) < len(ended) else ""
    return _said(fmean(values), stdev(values) if len(values) > 1 else None) + diverged


def _said(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _mean_score(found: list[CellResult], name: str) -> str:
    mean, only_last = mean_score(found, name)
    last = " (last)" if only_last else ""
    return "" if mean is None else f"{mean:.3f}{last}" if "loss" in name else f"{mean:.2f}{last}"


def mean_score(found: list[CellResult], name: str) -> tuple[float | None, bool]:
    """The mean over seeds, shares in %, losses as they are; and whether some run has its last evaluation's alone."""
    known = [score for result in found if (score := result.score(name)) is not None]
    if not known:
        return None, False
    mean = fmean(score.value for score in known)
    return mean if "loss" in name else 100 * mean, any(score.only_last for score in known)


def _ran_on(table: PaperTable, row: Row, result: CellResult) -> tuple[str, ...]:
    """All in which a run is not the paper's: what its task stood in for, its number of versions and its local training."""
    told = result.stand_in.split("; ") if result.stand_in else []
    if row.untrained:
        return tuple(told) or (OWN,)
    # Through a configuration of today, which has the defaults of what an older one leaves out.
    ours, paper = to_config(from_config(result.config)), to_config(load(table.recipe, algorithm=row.algorithm))
    if ours["num_versions"] != paper["num_versions"]:
        told.append(f"{ours['num_versions']} versions in place of {paper['num_versions']}")
    for key in dict.fromkeys((*paper["local"], *ours["local"])):
        now, was = (each["local"].get(key, "none") for each in (ours, paper))
        told += [f"{key} {now} in place of {was}"] if now != was else []
    return tuple(told) or (OWN,)


UNBROKEN = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
SINGLE = {"final": "the last one's", "best": "the best one's"}
"""Scores that are of one evaluation."""


def as_text(view: View) -> Iterator[Table]:
    """A small table for each column: they are read one below the other."""
    for column in view.table.columns:
        own = f", with {' '.join(view.table.own)}" if view.table.own else ""
        title = Text(f"{view.table.title}: {column.label}{own}")
        shown = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("method", *view.headings):
            words = heading in ("method", "ran on")  # where a terminal is narrow, words are folded and figures are whole
            shown.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
        marks = Marks()
        for row, (figure,) in view.rows(column):
            shown.add_row(row.label, *figure.cells(marks))
        shown.caption = Text(marks.told("\n") + "\n") if marks.known else None
        yield shown


def as_markdown(view: View) -> str:
    marks = Marks()
    heading, *lines = _lines(view, marks)
    rule = ["---"] + ["---:"] * (len(heading) - 1)
    shown = "\n".join("| " + " | ".join(line) + " |" for line in [heading, rule, *lines]).replace(" ± ", UNBROKEN)
    told = [marks.told("; ")] if marks.known else []
    return "\n\n".join([shown, *told, *([f"With {' '.join(view.table.own)}"] if view.table.own else [])])


def as_csv(view: View) -> str:
    """For other programs: a line for each row and column of the table, and one number in a field."""
    lines = [_numbers(view, row, column) for row in view.table.rows for column in view.table.columns]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue().rstrip("\n")


def _numbers(view: View, row: Row, column: Column) -> dict[str, str | float | int | None]:
    ended = view.finished(row, column)
    trained = [result for result in ended.values() if not result.diverged]
    values, paper = accuracies(trained), view.table.values.get((row.label, column.label), (None, None))
    told: dict[str, str | float | int | None] = {"method": row.label, "setting": column.label, "seeds": len(ended)}
    told |= {"diverged": len(ended) - len(trained), "ours": _rounded(fmean(values)) if values else None}
    told["deviation"] = _rounded(stdev(values)) if len(values) > 1 else None
    if view.by_seed:
        alone = {seed: next(iter(accuracies([ended[seed]])), None) if seed in ended else None for seed in view.seeds}
        told |= {f"seed {seed}": _rounded(value) for seed, value in alone.items()}
        told["diverged seeds"] = " ".join(str(seed) for seed in view.seeds if seed in ended and ended[seed].diverged)
    scores = {heading: mean_score(trained, name) for name, heading in view.table.scores}
    told |= {heading: _rounded(mean) for heading, (mean, _) in scores.items()}
    told["last alone"] = " ".join(heading for heading, (_, only_last) in scores.items() if only_last)
    told |= {"paper": paper[0], "paper deviation": paper[1]}
    if not view.table.names_stand_ins:
        points, deviations = gap_of(trained, view.table.values.get((row.label, column.label)))
        told |= {"gap": _rounded(points), "gap in deviations": _rounded(deviations)}
    else:
        told["ran on"] = " or ".join("; ".join(each) for each in view.stand_ins(row, ended.values()))
    if view.table.own:
        told["with"] = " ".join(view.table.own)
    told["hardware"] = "; ".join(_hardware(ended.values()))
    told["unlabeled"] = "; ".join(sorted({result.unlabeled for result in ended.values() if result.unlabeled}))
    return told


def _rounded(value: float | None) -> float | None:
    """So many digits that nothing is lost which an evaluation can tell."""
    return None if value is None else round(value, 4)


def _lines(view: View, marks: Marks) -> Iterator[list[str]]:
    """The heading, then a line per row: its label, and the figures of each column."""
    first, *others = view.headings
    columns = view.table.columns
    yield ["method", *(heading for column in columns for heading in (f"{column.label}: {first}", *others))]
    for row, figures in view.rows(*columns):
        yield [row.label, *(cell for figure in figures for cell in figure.cells(marks))]


def notes_of(view: View) -> list[str]:
    """What stands beside the numbers: hardware, software, U, and every file that took the place of another."""
    found = list(view.all_finished())
    if not found:
        return [f"none of these cells has run yet: there is no result of them in {view.results}"]
    notes = _hardware(found)
    notes += sorted({f"U: {result.unlabeled}" for result in found if result.unlabeled})
    for key in ("trained", "judged on", "prompt"):
        notes += sorted({f"{key}: {result.notes[key]!r}" for result in found if key in result.notes})
    return [_what_figures_are(view.table, found), *notes, *_other_files(found)]


def _hardware(found: Iterable[CellResult]) -> list[str]:
    return sorted({f"{result.execution.get('device', 'CPU')}, torch {result.software['torch']}" for result in found})


def _what_figures_are(table: PaperTable, found: list[CellResult]) -> str:
    beside = "; ".join(f"{heading}: {SINGLE.get(heading, 'the same')}" for _, heading in table.scores)
    most = max(len(result.evaluations) for result in found)
    last = "mean of a run's last ten evaluations" if most > 1 else "of a run's one evaluation"
    empty = "an empty cell has not run, rows of our own that have not are left out"
    gap = "" if table.names_stand_ins else "; gap: ours minus the paper's in points (in the paper's deviations)"
    return f"accuracy in %, {last} ({beside}), mean ± deviation over seeds{gap}; {empty}"


def _other_files(found: list[CellResult]) -> Iterator[str]:
    """Runs of a model whose files were others than most runs of that name had."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for result in found:
        if "model files" in result.notes:
            files = kinds.setdefault(result.notes["model"], {})
            files.setdefault(result.notes["model files"].partition(",")[0], set()).add(result.cell)
    for model, files in sorted(kinds.items()):
        most, *others = sorted(files, key=lambda kind: (-len(files[kind]), kind))
        for kind in others:
            yield f"{model}: files of {kind[:15]}... in {', '.join(sorted(files[kind]))}, of {most[:15]}... in the others"

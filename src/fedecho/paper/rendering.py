"""Renders the paper's tables with our results as text, Markdown and CSV."""

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
from fedecho.runs.resolve import resolved, with_defaults

AS_IN_PAPER = "the paper's own"


@dataclass
class Footnotes:
    """Numbered footnotes for texts that are the same in many rows."""

    numbers: dict[str, int] = field(default_factory=dict)

    def mark(self, texts: tuple[str, ...]) -> str:
        if texts == (AS_IN_PAPER,):
            return AS_IN_PAPER
        return f"[{' '.join(str(self.numbers.setdefault(text, len(self.numbers) + 1)) for text in texts)}]"

    def joined(self, separator: str) -> str:
        return separator.join(f"[{number}] {text}" for text, number in self.numbers.items())


@dataclass(frozen=True)
class View:
    """A table to render: where its results are, which seeds, and whether each seed has its own column."""

    table: PaperTable
    results: Path
    seeds: tuple[int, ...]
    by_seed: bool = False

    @property
    def headings(self) -> list[str]:
        """The headings below one column of the paper's table, matching ``Figure.cells``."""
        seeds = [f"seed {seed}" for seed in self.seeds] if self.by_seed else ["seeds"]
        last = "ran on" if self.table.names_stand_ins else "gap"
        paper = ["paper", last] if self.table.values else []
        return ["ours" if paper else "accuracy", *seeds, *(heading for _, heading in self.table.scores), *paper]

    def finished(self, row: Row, column: Column) -> dict[int, CellResult]:
        """The finished results of a cell, by seed. An untrained model has one result for all seeds."""
        cells = {seed: self.table.cell(row, column, seed) for seed in (self.seeds[:1] if row.untrained else self.seeds)}
        results = {seed: read_result(self.results, cell) for seed, cell in cells.items()}
        return {seed: result.until(column.until_s) for seed, result in results.items() if result is not None}

    def all_finished(self) -> Iterator[CellResult]:
        for row in self.table.rows:
            for column in self.table.columns:
                yield from self.finished(row, column).values()

    def rows(self, *columns: Column) -> list[tuple[Row, list["Figure"]]]:
        """The rows to show. Control rows without any results are omitted, unless there are no other rows."""
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
            paper=_plus_minus(*paper) if paper else "",
            gap=_gap_text(gap_of(trained, paper)),
            stand_ins=self.stand_ins(row, ended.values()) if self.table.names_stand_ins else None,
            in_paper=bool(self.table.values),
        )

    def stand_ins(self, row: Row, ended: Iterable[CellResult]) -> tuple[tuple[str, ...], ...]:
        """The deviations of these runs from the paper's, one tuple per distinct set."""
        return tuple(sorted({_ran_on(self.table, row, result) for result in ended}))


@dataclass(frozen=True)
class Figure:
    """The texts of one cell: our mean over the finished seeds, and the paper's value."""

    ours: str
    seeds: tuple[str, ...]
    """Each seed's accuracy, or the number of seeds."""
    scores: tuple[str, ...]
    paper: str
    gap: str
    """Ours minus the paper's. Replaced by ``stand_ins`` in tables whose runs used another model."""
    stand_ins: tuple[tuple[str, ...], ...] | None
    """The deviations of its runs from the paper's, one tuple per distinct set. None in tables that do not show them."""
    in_paper: bool = True
    """Whether the paper has a table like this one."""

    def cells(self, footnotes: Footnotes) -> list[str]:
        """The texts below ``View.headings``. Stand-ins are shown as footnote marks."""
        last = self.gap if self.stand_ins is None else " or ".join(map(footnotes.mark, self.stand_ins))
        return [self.ours, *self.seeds, *self.scores, *([self.paper, last] if self.in_paper else [])]


def accuracies(results: Iterable[CellResult]) -> list[float]:
    """Accuracies in %, without those of diverged runs."""
    return [100 * result.accuracy for result in results if not result.diverged]


def gap_of(trained: Iterable[CellResult], paper: tuple[float, float | None] | None) -> tuple[float | None, float | None]:
    """Our mean minus the paper's, in points and in standard deviations of the paper."""
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
    """Our mean and deviation, and the number of diverged runs, which have no accuracy."""
    ended = list(results)
    values = accuracies(ended)
    if not values:
        return "diverged" if ended else ""
    diverged = f" ({len(ended) - len(values)} diverged)" if len(values) < len(ended) else ""
    return _plus_minus(fmean(values), stdev(values) if len(values) > 1 else None) + diverged


def _plus_minus(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _mean_score(results: list[CellResult], name: str) -> str:
    if name == "minutes_to_90":
        return _minutes(results)
    mean, only_last = mean_score(results, name)
    last = " (last)" if only_last else ""
    return "" if mean is None else f"{mean:.3f}{last}" if "loss" in name else f"{mean:.2f}{last}"


def _minutes(results: list[CellResult]) -> str:
    """The mean time to the goal. A run that never reaches it counts with its whole time, so the mean is a lower bound."""
    reached = sum(result.summary["reached_90"] for result in results)
    if not reached:
        return "never" if results else ""
    mean = fmean(result.summary["minutes_to_90"] for result in results)
    return f"{mean:.0f}" if reached == len(results) else f"> {mean:.0f} ({reached} of {len(results)})"


def mean_score(results: list[CellResult], name: str) -> tuple[float | None, bool]:
    """The mean over seeds (in %, except for losses), and whether some run has only its last evaluation."""
    scores = [score for result in results if (score := result.score(name)) is not None]
    if not scores:
        return None, False
    mean = fmean(score.value for score in scores)
    return mean if "loss" in name or "minutes" in name else 100 * mean, any(score.only_last for score in scores)


def _ran_on(table: PaperTable, row: Row, result: CellResult) -> tuple[str, ...]:
    """A run's deviations from the paper: replaced model or data, number of versions, local training."""
    deviations = result.stand_in.split("; ") if result.stand_in else []
    if row.untrained:
        return tuple(deviations) or (AS_IN_PAPER,)
    # An older result may lack settings of today.
    ours, paper = with_defaults(result.config), resolved(table.recipe, algorithm=row.algorithm)
    if ours["num_versions"] != paper["num_versions"]:
        deviations.append(f"{ours['num_versions']} versions in place of {paper['num_versions']}")
    for key in dict.fromkeys((*paper["local"], *ours["local"])):
        our_value, paper_value = (each["local"].get(key, "none") for each in (ours, paper))
        deviations += [f"{key} {our_value} in place of {paper_value}"] if our_value != paper_value else []
    return tuple(deviations) or (AS_IN_PAPER,)


UNBROKEN = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
MEANING = {
    "final": "of the last one",
    "best": "of the best one",
    "stragglers": "on the slow clients' classes, weighted by their examples",
    "area": "mean over the whole virtual time",
    "min to 90 %": "virtual minutes, of seeds that never reach it the whole time",
}


def as_text(view: View) -> Iterator[Table]:
    """Render one small table per column of the paper's table, to be printed one below the other."""
    for column in view.table.columns:
        own = f", with {' '.join(view.table.own)}" if view.table.own else ""
        title = Text(f"{view.table.title}: {column.label}{own}")
        shown = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for heading in ("method", *view.headings):
            is_text = heading in ("method", "ran on")  # in a narrow terminal, only text is wrapped
            shown.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
        footnotes = Footnotes()
        for row, (figure,) in view.rows(column):
            shown.add_row(row.label, *figure.cells(footnotes))
        shown.caption = Text(footnotes.joined("\n") + "\n") if footnotes.numbers else None
        yield shown


def as_markdown(view: View) -> str:
    """Render the whole table as Markdown, with footnotes below."""
    footnotes = Footnotes()
    heading, *lines = _lines(view, footnotes)
    rule = ["---"] + ["---:"] * (len(heading) - 1)
    shown = "\n".join("| " + " | ".join(line) + " |" for line in [heading, rule, *lines]).replace(" ± ", UNBROKEN)
    below = [footnotes.joined("; ")] if footnotes.numbers else []
    return "\n\n".join([shown, *below, *([f"With {' '.join(view.table.own)}"] if view.table.own else [])])


def as_csv(view: View) -> str:
    """Render as CSV for other programs: one line per cell of the table, one number per field."""
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
    line: dict[str, str | float | int | None] = {"method": row.label, "setting": column.label, "seeds": len(ended)}
    line |= {"diverged": len(ended) - len(trained), "ours": _rounded(fmean(values)) if values else None}
    line["deviation"] = _rounded(stdev(values)) if len(values) > 1 else None
    if view.by_seed:
        by_seed = {seed: next(iter(accuracies([ended[seed]])), None) if seed in ended else None for seed in view.seeds}
        line |= {f"seed {seed}": _rounded(value) for seed, value in by_seed.items()}
        line["diverged seeds"] = " ".join(str(seed) for seed in view.seeds if seed in ended and ended[seed].diverged)
    scores = {heading: mean_score(trained, name) for name, heading in view.table.scores}
    line |= {heading: _rounded(mean) for heading, (mean, _) in scores.items()}
    line["last alone"] = " ".join(heading for heading, (_, only_last) in scores.items() if only_last)
    line |= {"paper": paper[0], "paper deviation": paper[1]}
    if not view.table.names_stand_ins:
        points, deviations = gap_of(trained, view.table.values.get((row.label, column.label)))
        line |= {"gap": _rounded(points), "gap in deviations": _rounded(deviations)}
    else:
        line["ran on"] = " or ".join("; ".join(each) for each in view.stand_ins(row, ended.values()))
    if view.table.own:
        line["with"] = " ".join(view.table.own)
    line["hardware"] = "; ".join(_hardware(ended.values()))
    line["unlabeled"] = "; ".join(sorted({result.unlabeled for result in ended.values() if result.unlabeled}))
    return line


def _rounded(value: float | None) -> float | None:
    """Round to four digits, beyond the resolution of any evaluation."""
    return None if value is None else round(value, 4)


def _lines(view: View, footnotes: Footnotes) -> Iterator[list[str]]:
    """Yield the heading, then one line per row: its label and the texts of each column."""
    first, *others = view.headings
    columns = view.table.columns
    yield ["method", *(heading for column in columns for heading in (f"{column.label}: {first}", *others))]
    for row, figures in view.rows(*columns):
        yield [row.label, *(cell for figure in figures for cell in figure.cells(footnotes))]


def notes_of(view: View) -> list[str]:
    """Notes below a table: the meaning of its figures, hardware, software, unlabeled data and deviating model files."""
    results = list(view.all_finished())
    if not results:
        return [f"none of these cells has run yet: {view.results} has no results of them"]
    notes = _hardware(results)
    notes += sorted({f"U: {result.unlabeled}" for result in results if result.unlabeled})
    for key in ("trained", "judged on", "prompt"):
        notes += sorted({f"{key}: {result.notes[key]!r}" for result in results if key in result.notes})
    return [_legend(view.table, results), *notes, *_other_files(results)]


def _hardware(results: Iterable[CellResult]) -> list[str]:
    return sorted({f"{result.execution.get('device', 'CPU')}, torch {result.software['torch']}" for result in results})


def _legend(table: PaperTable, results: list[CellResult]) -> str:
    scores = "; ".join(f"{heading}: {MEANING.get(heading, 'the same')}" for _, heading in table.scores)
    most = max(len(result.evaluations) for result in results)
    last = "mean of a run's last ten evaluations" if most > 1 else "of a run's only evaluation"
    if any(column.until_s for column in table.columns):
        last = "mean over the last tenth of the virtual time"
    empty = "empty cells have not run; control rows without results are omitted"
    gap = (
        ""
        if table.names_stand_ins or not table.values
        else "; gap: ours minus the paper's in points (in the paper's deviations)"
    )
    return f"accuracy in %, {last} ({scores}), mean ± deviation over seeds{gap}; {empty}"


def _other_files(results: list[CellResult]) -> Iterator[str]:
    """One line for each model whose files differ between runs, naming the runs that deviate from the majority."""
    by_model: dict[str, dict[str, set[str]]] = {}
    for result in results:
        if "model files" in result.notes:
            files = by_model.setdefault(result.notes.get("model", "a model"), {})
            files.setdefault(result.notes["model files"].partition(",")[0], set()).add(result.cell)
    for model, files in sorted(by_model.items()):
        most, *others = sorted(files, key=lambda digest: (-len(files[digest]), digest))
        for digest in others:
            yield f"{model}: files of {digest[:15]}... in {', '.join(sorted(files[digest]))}, of {most[:15]}... in the others"

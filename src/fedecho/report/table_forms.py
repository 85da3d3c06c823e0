"""A paper's table as text, Markdown and CSV, and what stands beside its numbers."""

import csv
import io
from collections.abc import Iterable, Iterator
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedecho.experiments.paper import Column, PaperTable, Row
from fedecho.experiments.results import CellResult
from fedecho.report.paper_tables import Marks, View, accuracies, gap_of, mean_score

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

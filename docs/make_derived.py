"""Makes what is derived from other files: the tutorial's notebook, the simulator's pictures and the tables of results.

python docs/make_derived.py
"""

import json
import re
import shlex
import shutil
import tempfile
from contextlib import chdir
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from typer.testing import CliRunner

from fedecho.cli import app
from fedecho.paper.results import CellResult, read_result
from fedecho.paper.stragglers import STRAGGLER_TABLES
from fedecho.paper.tables import Column
from fedecho.report.spec import PALETTE, Curve, Figure, HeatMap

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
MADE = re.compile(r"<!-- fedecho (table .*?) -->\n(.*?)\n<!-- end -->", flags=re.DOTALL)
"""A table between the command that makes it and its end."""
PICTURES = {
    "timeline-1": "timeline",
    "staleness-by-class": "staleness",
    "participation": "participation",
    "straggler-curves": "straggler-curves",
    "straggler-methods": "straggler-methods",
}


def notebook(page: str) -> dict[str, Any]:
    """A cell for every Python block and for all text between; the shell's commands become `!` cells."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(re.split(r"^```(python|sh)\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)):
        kind = number % 3
        if kind == 0 and part.strip():
            cells.append({"cell_type": "markdown", "id": f"text-{number}", "metadata": {}, "source": part.strip()})
        elif kind == 1:
            shell = part == "sh"
        elif kind == 2:
            source = "\n".join(f"!{line}" for line in part.strip().splitlines()) if shell else part.strip()
            if "make install" not in source:
                cell = {"cell_type": "code", "id": f"code-{number}", "metadata": {}, "source": source}
                cells.append(cell | {"execution_count": None, "outputs": []})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def write_notebook() -> None:
    made = notebook((DOCS / "tutorial.md").read_text())
    (DOCS / "tutorial.ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


def write_pictures() -> None:
    from fedecho import load, simulate
    from fedecho.report.page import report_of
    from fedecho.report.paper_figures import write_figures
    from fedecho.report.spec import Report, Section

    with tempfile.TemporaryDirectory() as folder:
        simulate(load("digits", algorithm="fedbuff", versions=100), out=Path(folder) / "run")
        write_figures(report_of([Path(folder) / "run"]), Path(folder))
        write_figures(Report("", "", [Section("", "", figures=[straggler_curves(), straggler_map()])]), Path(folder))
        (DOCS / "pictures").mkdir(exist_ok=True)
        for slug, name in PICTURES.items():
            shutil.copy(Path(folder) / f"{slug}.svg", DOCS / "pictures" / f"{name}.svg")


STRAGGLERS = STRAGGLER_TABLES["stragglers"]
SHOWN = ("FedAvg", "FedBuff", "CA2FL", "FedEcho", "FedEcho+")
BANDS = ("FedBuff", "FedEcho+")


def results_of(label: str, column: Column) -> list[CellResult]:
    """The results of a method of the stragglers' table, one per seed."""
    (row,) = (row for row in STRAGGLERS.rows if row.label == label)
    found = (read_result(ROOT / "results", STRAGGLERS.cell(row, column, seed)) for seed in STRAGGLERS.seeds)
    return [result.until(column.until_s) for result in found if result is not None]


def straggler_curves() -> Figure:
    """Accuracy on the classes of the slow clients alone over virtual time: mean over seeds, and the range of two methods."""
    column, curves = STRAGGLERS.columns[0], []
    grid = np.linspace(0, column.until_s or 0, 121)
    for number, label in enumerate(SHOWN):
        steps = []
        for result in results_of(label, column):
            times = [line["time"] for line in result.evaluations]
            values = np.array([0.0, *(line["straggler_accuracy"] for line in result.evaluations)])
            steps.append(values[np.searchsorted(times, grid, side="right")])
        band = (np.min(steps, 0), np.max(steps, 0)) if label in BANDS else (None, None)
        curves.append(Curve(label, grid / 60, np.mean(steps, 0), PALETTE[number], *band))
    title = "Accuracy on the two classes that only the slow clients hold"
    return Figure("straggler-curves", title, "virtual minutes", "accuracy", curves, wide=True, percent=True)


def straggler_map() -> Figure:
    """Final accuracy on the slow clients' classes of all methods in all columns: mean over seeds."""
    columns, labels = STRAGGLERS.columns, [row.label for row in STRAGGLERS.rows]
    means = [
        [fmean(result.summary["straggler_accuracy"] for result in results_of(label, column)) for column in columns]
        for label in labels
    ]
    cells = HeatMap([column.label for column in columns], labels, np.array(means), "accuracy", annotated=True, z_max=1.0)
    title = "Final accuracy on the slow clients' classes, in %"
    return Figure("straggler-methods", title, "", "", [cells], wide=True, percent=True, height=380)


def with_tables(page: str) -> str:
    """The page with each of its tables as its command shows it, from the repository's own results."""

    def made(found: re.Match[str]) -> str:
        shown = CliRunner().invoke(app, shlex.split(found[1]), catch_exceptions=False)
        if shown.exit_code != 0:
            raise ValueError(f"fedecho {found[1]} ended with exit code {shown.exit_code}: {shown.stderr}")
        return f"<!-- fedecho {found[1]} -->\n{shown.stdout.strip()}\n<!-- end -->"

    with chdir(ROOT):
        return MADE.sub(made, page)


def write_tables() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    write_notebook()
    write_tables()
    write_pictures()

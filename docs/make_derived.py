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
from typing import Any

from typer.testing import CliRunner

from fedecho.cli import app

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
MADE = re.compile(r"<!-- fedecho (table .*?) -->\n(.*?)\n<!-- end -->", flags=re.DOTALL)
"""A table between the command that makes it and its end."""
PICTURES = {"timeline-1": "timeline", "staleness-by-class": "staleness", "participation": "participation"}


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

    with tempfile.TemporaryDirectory() as folder:
        simulate(load("digits", algorithm="fedbuff", versions=100), out=Path(folder) / "run")
        write_figures(report_of([Path(folder) / "run"]), Path(folder))
        (DOCS / "pictures").mkdir(exist_ok=True)
        for slug, name in PICTURES.items():
            shutil.copy(Path(folder) / f"{slug}.svg", DOCS / "pictures" / f"{name}.svg")


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

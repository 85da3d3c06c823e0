"""Every code block of the documentation is run; the site is built with warnings as errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.make_derived import notebook
from tests.docs.blocks import ROOT, blocks_of, run_python, run_shell, run_toml

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
WITH_CODE = [page for page in PAGES if any(block.kind != "text" for block in blocks_of(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page: Path) -> None:
    assert {block.kind for block in blocks_of(page)} <= {"python", "sh", "toml", "text", "nginx"}
    outside = [
        line for line in _without_fences(page) if line.startswith("    ") and line.strip().startswith(("fedecho ", "make "))
    ]
    assert not outside, "commands stand in a ```sh block, where they are run"


def _without_fences(page: Path) -> list[str]:
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            lines.append(line)
    return lines


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_every_block_runs_in_the_order_of_the_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": f"page_{page.stem}"}
    for block in blocks_of(page):
        if block.kind == "python":
            run_python(block, names)
        elif block.kind == "toml":
            run_toml(block, tmp_path)
        elif block.kind == "sh":
            for line in block.text.splitlines():
                run_shell(line)


@pytest.mark.parametrize("page", ["durability.md", "security.md"])
def test_every_promise_names_tests_that_exist(page: str) -> None:
    text = (DOCS / page).read_text()
    named = set(re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)", text))
    assert named, "a promise without a test is none"
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    sources = set(re.findall(r"`((?:core|storage|distill|flower)/\w+\.py)`", text))
    assert {name for name in sources if not (ROOT / "src" / "fedecho" / name).is_file()} == set()


def test_the_notebook_is_the_tutorial() -> None:
    kept = json.loads((DOCS / "tutorial.ipynb").read_text())
    assert kept == notebook((DOCS / "tutorial.md").read_text()), "run: python docs/make_derived.py"
    code = [cell["source"] for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 5


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("Experiment", "simulate", "FedEcho", "Distiller", "tracked"):
        assert name in reference

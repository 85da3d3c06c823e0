"""The page is one self-contained file, whatever the runs are called."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.report_time import make_run
from tests.report.hand_made import lines, write
from typer.testing import CliRunner

from fedecho import load, simulate
from fedecho.cli import app
from fedecho.report.page import page, plotly_js, report_of


def own(text: str) -> str:
    """The page without plotly.js, which names addresses that it asks only for maps."""
    return text.replace(plotly_js(), "")


def test_the_page_is_whole_and_needs_nothing(tmp_path: Path) -> None:
    text = page(report_of([write(tmp_path / "run", lines(), finished=True)]))
    assert len(text.encode()) < 6_000_000
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", own(text))
    assert "http" not in own(text).replace("http-equiv", "")
    assert not re.search(r"\{\{\w+\}\}", own(text))
    figures = json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)[1])
    assert all(f'id="{figure["slug"]}"' in text for figure in figures)
    assert "fedecho run by hand" in text


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    told = lines(algorithm="<script>alert(1)</script>")
    told[0]["command"] = told[0]["name"] = "</script><img src=x onerror=alert(1)>"
    text = own(page(report_of([write(tmp_path / "run", told)])))
    assert "<img" not in text
    assert "<script>alert" not in text


def test_the_command_writes_the_page_and_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    result = CliRunner().invoke(app, ["report", str(folder), "--json", "--figures", str(tmp_path / "figures")])
    told = json.loads(result.stdout)
    assert Path(told["page"]) == folder / "report.html"
    assert Path(told["page"]).stat().st_size == told["bytes"]
    assert len(told["files"]) == 2 * len(told["figures"]) > 20
    for path in map(Path, told["files"]):
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start
    quiet = CliRunner().invoke(app, ["report", str(folder), "--quiet"])
    assert quiet.stdout.strip() == str(folder / "report.html")
    into = CliRunner().invoke(app, ["report", str(folder), "--quiet", "--out", str(tmp_path)])
    assert into.stdout.strip() == str(tmp_path / "report.html")
    new = CliRunner().invoke(app, ["report", str(folder), "--quiet", "--out", str(tmp_path / "new")])
    assert new.stdout.strip() == str(tmp_path / "new" / "report.html")
    (tmp_path / "mine.toml").write_text("seed = 3\n")
    refused = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "mine.toml")])
    assert (refused.exit_code, "name that ends in .html" in " ".join(refused.stderr.split())) == (2, True)
    assert (tmp_path / "mine.toml").read_text() == "seed = 3\n"
    wrong = CliRunner().invoke(app, ["report", str(folder), "--figures", str(tmp_path / "report.html")])
    assert (wrong.exit_code, "report.html is a file, not a folder" in " ".join(wrong.stderr.split())) == (2, True)
    said = CliRunner().invoke(app, ["report", str(write(tmp_path / "old", lines(old=True)))]).stdout
    assert "left out: the timeline" in said


@pytest.mark.parametrize(("name", "more"), [("plotly.offline", []), ("matplotlib", ["--figures", "figures"])])
def test_a_missing_extra_is_one_line_with_the_fix(
    name: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", lines())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    done = CliRunner().invoke(app, ["report", str(folder), *more])
    assert done.exit_code == 2
    assert "pip install 'fedecho[report]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_trains_needs_none_of_the_extras() -> None:
    """A machine that only computes has no plotly, no matplotlib and no sinks."""
    absent = ["plotly", "matplotlib", "tensorboard", "wandb", "mlflow", "pydantic", "mkdocs"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import fedecho, fedecho.cli, fedecho.tracking"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_wide_run_stays_small(tmp_path: Path) -> None:
    make_run(tmp_path / "wide", "fedecho", 0, num_clients=2000, num_versions=60, buffer_size=10, concurrency=200)
    report = report_of([tmp_path / "wide"])
    assert len(page(report).encode()) < 6_000_000


def test_a_private_run_shows_what_it_cost_its_clients(tmp_path: Path) -> None:
    settings = ["task.width=2", "privacy.noise_multiplier=2.0"]
    done = simulate(load("digits", algorithm="fedbuff", versions=3, settings=settings), out=tmp_path / "run")
    assert done.summary.privacy is not None
    text = own(page(report_of([tmp_path / "run"])))
    assert "largest epsilon of a client" in text
    assert f"{done.summary.privacy['largest_epsilon']:.2f}" in text

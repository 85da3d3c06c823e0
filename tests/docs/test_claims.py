"""The gaps and missing runs that the pages state in prose are those of the committed results."""

import csv
import io
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT
from typer.testing import CliRunner

from fedecho.cli import app

README, REPRODUCTION = ROOT / "README.md", ROOT / "docs" / "reproduction.md"
SHORT = {"FedEcho (CIFAR-100)": "CIFAR-100", "FedEcho (STL10)": "STL-10", "FedEcho (synthetic)": "synthetic"}


def rows(table: str, *words: str) -> list[dict[str, str]]:
    result = CliRunner().invoke(app, ["table", table, "--show", "--format", "csv", "--results", str(ROOT / "results"), *words])
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))


def prose(page: Path) -> str:
    return " ".join(page.read_text().split())


@pytest.fixture(scope="module")
def large() -> dict[str, dict[str, str]]:
    return {row["method"]: row for row in rows("cifar10", "--only", "large-dir-0.1")}


@pytest.mark.parametrize("method", ["FedBuff", "CA2FL", "FedAC", "FADAS"])
def test_the_size_of_each_gap_is_stated(large: dict[str, dict[str, str]], method: str) -> None:
    gap, deviations = float(large[method]["gap"]), float(large[method]["gap in deviations"])
    assert abs(gap) == pytest.approx(deviations * float(large[method]["paper deviation"]), abs=0.01)
    assert f"{method} {gap:+.1f} ({abs(deviations):.1f})" in prose(REPRODUCTION)


def test_the_readme_states_how_far_the_baselines_are(large: dict[str, dict[str, str]]) -> None:
    below = [large[method] for method in ("FedBuff", "CA2FL", "FedAC")]
    one, two, three = (f"{-float(row['gap']):.0f}" for row in below)
    first, second, third = (f"{float(row['gap in deviations']):.1f}".lstrip("-") for row in below)
    fadas = f"FADAS is {float(large['FADAS']['gap']):.1f} above ({float(large['FADAS']['gap in deviations']):.1f} deviations)"
    assert f"Our FedBuff, CA2FL and FedAC are {one}, {two} and {three} points below the paper" in prose(README)
    assert f"({first}, {second} and {third} deviations); {fadas}" in prose(README)


def test_fedecho_is_within_one_deviation_of_the_paper(large: dict[str, dict[str, str]]) -> None:
    gaps = [large[method] for method in SHORT]
    assert all(abs(float(row["gap in deviations"])) < 1 for row in gaps)
    one, two, three = (f"{float(row['gap']):+.1f}" for row in gaps)
    assert f"({one}, {two} and {three} points)" in prose(README)


def test_the_margin_over_fedbuff_is_stated_with_the_papers(large: dict[str, dict[str, str]]) -> None:
    echo, buff = large["FedEcho (CIFAR-100)"], large["FedBuff"]
    ours, paper = (float(echo[of]) - float(buff[of]) for of in ("ours", "paper"))
    for page in (README, REPRODUCTION):
        assert f"margin over FedBuff is {ours:.0f} points here and {paper:.1f} in the paper" in prose(page)


def test_what_has_not_run_is_stated() -> None:
    hundred = rows("cifar100")
    assert sum(int(row["seeds"]) for row in hundred) == 0
    assert f"CIFAR-100 (0 of {3 * len(hundred)} runs)" in prose(README)
    missing = sum(3 - int(row["seeds"]) for table in ("samples", "alpha", "clip") for row in rows(table))
    assert f"the ablations beyond their default rows ({missing} runs missing)" in prose(REPRODUCTION)

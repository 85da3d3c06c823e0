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
    gaps = {method: float(large[method]["gap"]) for method in ("FedBuff", "CA2FL", "FedAC", "FADAS")}
    deviations = {method: abs(float(large[method]["gap in deviations"])) for method in gaps}
    below = f"Our FedBuff and CA2FL are {-gaps['FedBuff']:.0f} and {-gaps['CA2FL']:.0f} points below the paper"
    assert below in prose(README)
    assert f"({deviations['FedBuff']:.1f} and {deviations['CA2FL']:.1f} deviations)" in prose(README)
    assert f"FedAC is {gaps['FedAC']:.1f} above ({deviations['FedAC']:.1f} deviations, two seeds)" in prose(README)
    assert f"FADAS is {gaps['FADAS']:.1f} above ({deviations['FADAS']:.1f} deviations)" in prose(README)
    assert large["FedAC"]["seeds"] == "2"


def test_what_old_teachers_and_corrected_ones_bring_is_stated(large: dict[str, dict[str, str]]) -> None:
    echo, plus = large["FedEcho (CIFAR-100)"], large["FedEcho+ (CIFAR-100)"]
    assert f"({float(plus['ours']):.2f} and {float(echo['ours']):.2f}, three seeds)" in prose(README)
    assert plus["seeds"] == echo["seeds"] == "3"
    buffer = large["control: FedEcho, teachers of the current buffer"]
    assert f"({float(buffer['ours']):.2f} against 75.95, seed 0)" in prose(README)


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


STRAGGLERS = ROOT / "docs" / "stragglers.md"


@pytest.fixture(scope="module")
def lone() -> dict[str, dict[str, str]]:
    """The stragglers' table of the split in which only slow clients hold two classes, by method."""
    return {row["method"]: row for row in rows("stragglers", "--only", "lone-large")}


def test_how_the_methods_hear_stragglers_is_stated(lone: dict[str, dict[str, str]]) -> None:
    text = prose(STRAGGLERS)
    echo, plus, buff, ca2fl, sgd = (lone[name] for name in ("FedEcho", "FedEcho+", "FedBuff", "CA2FL", "FedEcho, SGD"))
    assert f"{float(echo['stragglers']):.1f} % on 8 and 9 against {float(buff['stragglers']):.1f} %" in text
    ahead = f"{float(echo['ours']) - float(buff['ours']):.1f} points"
    assert f"and {ahead} in accuracy" in text
    assert f"FedEcho ends {ahead} above FedBuff" in prose(README)
    assert f"after {float(echo['min to 90 %']):.0f} and {float(buff['min to 90 %']):.0f} minutes" in text
    assert f"gets there in {float(plus['min to 90 %']):.0f} minutes" in text
    assert f"Its area is {float(plus['area']) - float(echo['area']):.1f} points above FedEcho's" in text
    assert f"cannot be told apart ({float(plus['ours']):.1f} and {float(echo['ours']):.1f})" in text
    assert f"with {float(ca2fl['ours']):.1f} % and with {float(ca2fl['stragglers']):.1f} % on 8 and 9" in text
    assert f"by {float(ca2fl['area']) - float(plus['area']):.1f} in area".replace("0.", ".") in text
    assert f"as Adam ({float(sgd['ours']):.1f} and {float(echo['ours']):.1f})" in text
    assert f"has {float(lone['FedBuff, polynomial weights']['stragglers']):.0f} % on 8 and 9" in text
    assert f"in the same way, {float(lone['FedAsync']['stragglers']):.0f} %" in text


def test_what_old_logits_and_the_correction_bring_is_stated() -> None:
    here = {row["method"]: float(row["stragglers"]) for row in rows("straggler-ablations", "--only", "lone")}
    old = [
        here[f"{name}{teachers}"]
        for name in ("FedEcho", "FedEcho+")
        for teachers in ("", ", teachers at most 30 versions old", ", teachers of the current buffer")
    ]
    text = prose(STRAGGLERS)
    assert f"{old[0]:.1f} % with everybody's latest logits, {old[1]:.1f} % with those of the last 30 versions" in text
    assert f"and {old[2]:.1f} % with those of the current buffer alone" in text
    assert f"{old[3]:.1f}, {old[4]:.1f} and {old[5]:.1f} %" in text
    weaker = (here["FedEcho+, half the correction"], here["FedEcho+, shared prior"])
    assert f"({weaker[0]:.1f} and {weaker[1]:.1f} %)" in text
    assert f"{here['FedEcho+ over CA2FL']:.1f} %, and 90 % after 11 minutes" in text
    assert f"suffice for {here['FedEcho, 30 samples']:.1f} %" in text


def test_where_fast_clients_hold_the_classes_too_the_methods_are_close() -> None:
    every = rows("stragglers", "--without", "lone")
    settings = {row["setting"] for row in every}
    assert len(settings) == 4
    for setting in settings:
        here = {row["method"]: row for row in every if row["setting"] == setting and row["method"] not in ("FedAvg", "FedAC")}
        ours = [float(row["ours"]) for row in here.values()]
        assert max(ours) - min(ours) < 2
        assert max(here, key=lambda method: float(here[method]["area"])) in ("FedEcho+", "FedEcho, SGD")
        assert float(here["FedEcho+"]["area"]) >= max(float(row["area"]) for row in here.values()) - 0.05

"""The scaling benchmark's arithmetic, a small run of it, and its page."""

import doctest
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import slopes
from benchmarks.derived import filled, table
from benchmarks.scaling.__main__ import PAGE, RESULTS, measured
from benchmarks.scaling.axes import AXES, QUICK
from benchmarks.scaling.measure import Subject, interleaved, summed_up
from benchmarks.scaling.page import parts, quantity, summary
from benchmarks.scaling.pictures import draw_axis
from benchmarks.scaling.workers import seconds_per_update
from hypothesis import given
from hypothesis import strategies as st

from fedecho import load


def test_the_doctests_of_the_lines() -> None:
    assert doctest.testmod(slopes) == doctest.TestResults(0, 3)


@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=9, unique=True), st.integers(0, 10**6))
def test_a_line_is_numpys(x: list[float], seed: int) -> None:
    if min(np.diff(np.log(sorted(x)))) < 1e-3:
        return
    y = np.exp(np.random.default_rng(seed).standard_normal(len(x)))
    (exponent, intercept), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    found = slopes.power_law(x, y.tolist())
    assert found.exponent == pytest.approx(exponent, rel=1e-6, abs=1e-9)
    assert np.log(found.scale) == pytest.approx(intercept, rel=1e-6, abs=1e-9)
    assert found.error == pytest.approx(covariance[0, 0] ** 0.5, rel=1e-5)


def test_what_a_line_cannot_be_drawn_through() -> None:
    with pytest.raises(ValueError, match="two different x"):
        slopes.power_law([1, 1], [1, 2])
    with pytest.raises(ValueError, match="above 0"):
        slopes.power_law([1, 2], [0, 2])
    with pytest.raises(ValueError, match="two values"):
        slopes.interval([1.0])


@given(st.lists(st.floats(0.2, 30), min_size=3, max_size=7))
def test_a_busy_round_hurts_all_points_alike(busy: list[float]) -> None:
    """However slow a round was, the exponent stays."""
    x = np.array([1.0, 10.0, 100.0])
    found = summed_up(x.tolist(), np.outer(busy, 2e-5 * x**0.7))
    line = slopes.power_law([one.x for one in found], [one.seconds for one in found])
    assert (line.exponent, line.error) == pytest.approx((0.7, 0.0), abs=1e-6)
    assert found[0].seconds == pytest.approx(2e-5 * np.median(busy), rel=1e-6)


def test_rounds_visit_every_point_and_turn_around() -> None:
    visits: list[str] = []

    def at(name: str) -> Callable[[int], None]:
        return lambda chunks: visits.append(name)

    interleaved([Subject(1, at("a")), Subject(2, at("b"))], 2, 1e-9, lambda: None)
    assert "".join(visits) == "aabb" + "ab" + "ba"


def growth(clients: Any) -> float:
    """How many times as long an update of FedBuff takes with ten times as many clients."""
    (few, many) = next(one for one in clients["series"] if (one["name"], one["unit"]) == ("FedBuff", "s per update"))["y"]
    return float(many / few)


def test_a_quick_run_of_every_axis_in_this_process() -> None:
    found = measured(list(AXES), QUICK)
    assert list(found) == [name for name in AXES if name != "workers"]
    curves = {(name, curve["name"], curve["unit"]): curve for name, axis in found.items() for curve in axis["series"]}
    assert all(min(curve["y"]) > 0 for curve in curves.values())
    # A server that looks at all clients takes ten times as long at every attempt, however busy the machine is.
    assert growth(found["clients"]) < 4 or any(growth(measured(["clients"], QUICK)["clients"]) < 4 for _ in range(4))
    for key in (("clients", "FedEcho's bank, |U| = 20, C = 10"), ("model", "CA2FL, N = 20"), ("model", "FedBuff")):
        assert curves[*key, "bytes"]["fit"]["exponent"] == pytest.approx(1, abs=0.05), key
    assert "\\|U\\|" in summary({"axes": found})


def test_seconds_per_update_in_a_pool() -> None:
    experiment = load("digits", algorithm="fedbuff", versions=1000, settings=["task.width=1", "local.num_local_steps=1"])
    assert 0 < seconds_per_update(experiment, 1, 4) < 600


def test_quantities_and_tables() -> None:
    assert [quantity(v, "s per update") for v in (2.5, 0.00125, 42e-6)] == ["2.5 s", "1.25 ms", "42 µs"]
    assert [quantity(v, "bytes") for v in (16_000_000, 12)] == ["16 MB", "12 B"]
    assert table(["a", "|U|"], [["x", "1"]]) == "| a | \\|U\\| |\n| --- | ---: |\n| x | 1 |"
    with pytest.raises(ValueError, match="the results give"):
        filled("<!-- made: one -->\n<!-- end -->", {"two": ""})


def test_the_page_is_made_of_the_results(tmp_path: Path) -> None:
    page, results = PAGE.read_text(), json.loads(RESULTS.read_text())
    assert filled(page, parts(results)) == page, "run: python -m benchmarks.scaling --page"
    for name in AXES:
        assert f"pictures/scaling-{name}.svg" in page
        assert (PAGE.parent / "pictures" / f"scaling-{name}.svg").is_file()
    draw_axis("workers", results["axes"]["workers"]["series"], tmp_path / "drawn.svg")
    assert "dotted: serial" in (tmp_path / "drawn.svg").read_text()

"""The benchmark of stragglers: figures at equal virtual time, and the promises of the table and its search."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedecho import load
from fedecho.core.loop import Moment
from fedecho.paper.results import read_result, scores_until
from fedecho.paper.stragglers import CANDIDATES, SEARCH_COLUMNS, SEARCH_S, SEARCH_SEED, STRAGGLER_TABLES
from fedecho.paper.tables import Cell, Column, Row, Settings
from fedecho.runs.build import forecast_of, runtimes_of
from fedecho.runs.config import to_config

RESULTS = Path(__file__).parents[2] / "results"
TABLE = STRAGGLER_TABLES["stragglers"]


@st.composite
def evaluated_runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    times = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=20, unique=True).map(sorted))
    return [
        {
            "time": float(time),
            "accuracy": draw(st.integers(0, 100)) / 100,
            "straggler_accuracy": draw(st.integers(0, 100)) / 100,
        }
        for time in times
    ]


@given(evaluated_runs())
def test_figures_at_equal_time_are_those_of_a_curve_sampled_at_every_second(evaluations: list[dict[str, Any]]) -> None:
    end = 2000
    curves = {name: np.zeros(end) for name in ("accuracy", "straggler_accuracy")}
    for line in evaluations:
        for name, curve in curves.items():
            curve[int(line["time"]) :] = line[name]
    scores = scores_until(evaluations, float(end))
    assert scores["area"] == pytest.approx(curves["accuracy"].mean())
    assert scores["accuracy"] == pytest.approx(curves["accuracy"][1800:].mean())
    assert scores["straggler_accuracy"] == pytest.approx(curves["straggler_accuracy"][1800:].mean())
    good = [line["time"] for line in evaluations if line["accuracy"] >= 0.9 and line["time"] <= end]
    assert (scores["reached_90"], scores["minutes_to_90"] * 60) == (bool(good), pytest.approx(good[0] if good else end))


def reports(cell: Cell, until_s: float) -> dict[int, int]:
    """How often each slow client's update is accepted until then, by the schedule without training."""
    experiment = cell.experiment()
    runtimes, heard = runtimes_of(experiment), Counter[int]()

    def count(moment: Moment) -> None:
        if moment.receipt.status == "accepted" and moment.time <= until_s:
            heard[moment.receipt.client] += 1

    forecast_of(experiment, runtimes, count)
    return {client: heard[client] for client in range(experiment.task.num_clients) if runtimes.class_of(client) == "long"}


@pytest.mark.parametrize("column", TABLE.columns, ids=lambda column: column.label)
@pytest.mark.parametrize("seed", TABLE.seeds)
def test_each_slow_client_is_heard_at_least_eight_times(column: Column, seed: int) -> None:
    fedbuff = next(row for row in TABLE.rows if row.label == "FedBuff")
    assert column.until_s is not None
    heard = reports(TABLE.cell(fedbuff, column, seed), column.until_s)
    assert len(heard) == 2
    assert min(heard.values()) >= 8


def test_slow_clients_alone_hold_two_classes() -> None:
    experiment = load("stragglers")
    runtimes, task = runtimes_of(experiment), experiment.task
    held = {client: set(task.label_counts(client)) for client in range(20)}
    for client in range(20):
        slow = runtimes.class_of(client) == "long"
        assert held[client] == {8, 9} if slow else not held[client] & {8, 9}


@pytest.mark.parametrize("name", STRAGGLER_TABLES)
def test_every_cell_has_run(name: str) -> None:
    table = STRAGGLER_TABLES[name]
    lacking = [cell.slug for cell in table.cells(table.seeds) if read_result(RESULTS, cell) is None]
    assert not lacking


def searched(label: str) -> dict[Settings, float]:
    """The mean over the splits, by candidate, of the accuracy that the search compares."""
    algorithm, fixed, candidates = CANDIDATES[label]
    table, means = STRAGGLER_TABLES["straggler-search"], dict[Settings, float]()
    for candidate in candidates:
        wanted = (*fixed, *candidate)
        (row,) = (row for row in table.rows if row.algorithm == algorithm and row.settings[: len(wanted)] == wanted)
        results = [read_result(RESULTS, table.cell(row, column, SEARCH_SEED)) for column in SEARCH_COLUMNS]
        means[candidate] = np.mean([result.until(SEARCH_S).summary["accuracy"] for result in results if result is not None])
    return means


@pytest.mark.parametrize("row", TABLE.rows, ids=lambda row: row.label)
def test_a_methods_rates_are_the_best_of_its_search(row: Row) -> None:
    """Equal budgets: nine candidates each, on a seed that is not reported."""
    means = searched(row.label)
    assert len(means) == 9
    assert SEARCH_SEED not in TABLE.seeds
    best = max(means, key=lambda candidate: means[candidate])
    config = to_config(TABLE.cell(row, TABLE.columns[0], 11).experiment())
    for setting in best:
        name, _, value = setting.partition("=")
        assert value_at(config, name) == pytest.approx(float(value)), setting


def value_at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config

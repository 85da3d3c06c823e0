"""The pictures of docs/theory.md."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing import COLORS, MARKERS, drawing, log_log
from benchmarks.theory.page import Results, Row, exponent, rows_of
from benchmarks.theory.run import FEDBUFF, FEDECHO, FIXED_LOCAL, STRONG_ECHO

LABEL = "mean of |∇f(x_t)|² over t = 1 … T"
INK = {FEDBUFF: 0, FEDECHO: 1, FIXED_LOCAL: 7, STRONG_ECHO: 5}


def draw_all(results: Results, folder: Path, kind: str = "svg") -> None:
    rates(results, folder / f"theory-rates.{kind}")
    staleness(results, folder / f"theory-staleness.{kind}")


def rates(results: Results, path: Path) -> None:
    with drawing(path, 2, 3.1) as (over_t, over_m):
        for method in (STRONG_ECHO, FIXED_LOCAL, FEDBUFF, FEDECHO):
            _curve(over_t, rows_of(results, "T", method), method, f"{method}: {exponent(rows_of(results, 'T', method))}")
        for method in (FEDBUFF, FEDECHO):
            _curve(over_m, rows_of(results, "M", method), method, f"{method}: {exponent(rows_of(results, 'M', method))}")
        for axes, sweep in ((over_t, "T"), (over_m, "M")):
            _half_power(axes, rows_of(results, sweep, FEDBUFF))
        fixed = results["problem"]["fixed_versions"]
        log_log(over_t, "Over the number of versions, M = 2", "T", LABEL)
        log_log(over_m, f"Over the buffer, T = {fixed}, Mc = 4 M", "M", "")
        for axes, sweep in ((over_t, "T"), (over_m, "M")):
            _ticks(axes, [row["x"] for row in rows_of(results, sweep, FEDBUFF)])
            axes.legend(loc="lower left")
        low, high = over_t.get_ylim()
        over_t.set_ylim(low / 2.2, high)  # room for the legend
        low, high = over_m.get_ylim()
        over_m.set_ylim(low / 1.4, high)


def staleness(results: Results, path: Path) -> None:
    with drawing(path, 2, 2.7) as (slow, crowded):
        for axes, sweep in ((slow, "slow"), (crowded, "Mc")):
            for method in (FEDECHO, FEDBUFF):
                rows = rows_of(results, sweep, method)
                _curve(axes, rows, method, method, [row["max_staleness"] for row in rows])
            axes.legend(loc="upper left")
        log_log(slow, "A slow tenth: mean staleness stays at Mc / M = 4", "largest staleness τ_max", LABEL)
        log_log(crowded, "More clients at work: mean staleness is Mc / M", "largest staleness τ_max", "")
        slow.set_ylim(*crowded.get_ylim())


def _curve(axes: Any, rows: list[Row], method: str, label: str, x: list[float] | None = None) -> None:
    """The mean over seeds, and the span of the seeds around it."""
    values, place = np.array([row["mean_square"] for row in rows]), INK[method]
    along = [row["x"] for row in rows] if x is None else x
    style = {"color": COLORS[place], "marker": MARKERS[place % len(MARKERS)]}
    axes.plot(along, values.mean(axis=1), label=label, **style)
    axes.fill_between(along, values.min(axis=1), values.max(axis=1), color=COLORS[place], alpha=0.18, linewidth=0)


def _half_power(axes: Any, rows: list[Row]) -> None:
    x = np.array([row["x"] for row in rows])
    first = 0.8 * float(np.mean(rows[0]["mean_square"]))
    axes.plot(x, first * (x / x[0]) ** -0.5, color="0.4", linestyle="--", linewidth=0.9, label="the theorem: −1/2")


def _ticks(axes: Any, places: list[float]) -> None:
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()

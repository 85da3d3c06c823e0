"""The pictures of docs/theory.md."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing import COLORS, drawing, log_log, plain_ticks
from benchmarks.theory.page import Results, Row, exponent, rows_of
from benchmarks.theory.run import FEDBUFF, FEDECHO, FIXED_LOCAL, STRONG_ECHO

LABEL = "mean of |∇f(x_t)|² over t = 1 … T"
INK = {FEDBUFF: (COLORS[0], "o"), FEDECHO: (COLORS[1], "s"), FIXED_LOCAL: (COLORS[7], "^"), STRONG_ECHO: (COLORS[5], "D")}


def draw_all(results: Results, folder: Path, kind: str = "svg") -> None:
    rates(results, folder / f"theory-rates.{kind}")
    staleness(results, folder / f"theory-staleness.{kind}")


def rates(results: Results, path: Path) -> None:
    with drawing(path, 2, 3.4) as (over_t, over_m):
        for axes, sweep, methods, room in (
            (over_t, "T", (FEDBUFF, FEDECHO, FIXED_LOCAL, STRONG_ECHO), 2.2),
            (over_m, "M", (FEDBUFF, FEDECHO), 1.6),
        ):
            for method in methods:
                rows = rows_of(results, sweep, method)
                _curve(axes, rows, method, f"{method}: {exponent(rows)}".replace("-", "−"))
            first = rows_of(results, sweep, FEDBUFF)
            _half_power(axes, first)
            axes.set(xscale="log", yscale="log")
            low, high = axes.get_ylim()
            axes.set_ylim(low / room, high)  # room for the legend
            axes.legend(loc="lower left")
        fixed = results["problem"]["fixed_versions"]
        log_log(over_t, "Over the number of versions, M = 2", "T", LABEL)
        log_log(over_m, f"Over the buffer, T = {fixed}, Mc = 4 M", "M", "")
        for axes, sweep in ((over_t, "T"), (over_m, "M")):
            plain_ticks(axes.xaxis, [row["x"] for row in rows_of(results, sweep, FEDBUFF)])
            plain_ticks(axes.yaxis)


def staleness(results: Results, path: Path) -> None:
    with drawing(path, 2, 2.7) as (slow, crowded):
        for axes, sweep in ((slow, "slow"), (crowded, "Mc")):
            for method in (FEDBUFF, FEDECHO):
                rows = rows_of(results, sweep, method)
                _curve(axes, rows, method, method, [row["max_staleness"] for row in rows])
            axes.legend(loc="upper left")
        log_log(slow, "A slow tenth: mean staleness stays at Mc / M = 4", "largest staleness τ_max", LABEL)
        log_log(crowded, "More clients at work: mean staleness is Mc / M", "largest staleness τ_max", "")
        slow.set_ylim(*crowded.get_ylim())
        for axes in (slow, crowded):
            plain_ticks(axes.xaxis)
            plain_ticks(axes.yaxis)


def _curve(axes: Any, rows: list[Row], method: str, label: str, x: list[float] | None = None) -> None:
    """The mean over seeds, and the span of the seeds around it."""
    values, (color, marker) = np.array([row["mean_square"] for row in rows]), INK[method]
    along = [row["x"] for row in rows] if x is None else x
    axes.plot(along, values.mean(axis=1), label=label, color=color, marker=marker)
    axes.fill_between(along, values.min(axis=1), values.max(axis=1), color=color, alpha=0.18, linewidth=0)


def _half_power(axes: Any, rows: list[Row]) -> None:
    x = np.array([row["x"] for row in rows])
    first = 0.8 * float(np.mean(rows[0]["mean_square"]))
    axes.plot(x, first * (x / x[0]) ** -0.5, color="0.4", linestyle="--", linewidth=0.9, label="the theorem: −1/2")

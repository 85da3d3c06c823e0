"""The pictures of docs/scaling.md: one per axis, with times on the left and bytes on the right."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing import COLORS, MARKERS, drawing, log_log
from benchmarks.scaling.axes import AXES, BYTES
from benchmarks.scaling.page import Results, quantity

WORDS = {"s per update": "time per update", "s per version": "time per version", BYTES: "memory"}


def draw_all(results: Results, folder: Path, kind: str = "svg") -> None:
    for name, axis in results["axes"].items():
        draw_axis(name, axis["series"], folder / f"scaling-{name}.{kind}")


def draw_axis(name: str, curves: list[dict[str, Any]], path: Path) -> None:
    units = list(dict.fromkeys(curve["unit"] for curve in curves))
    with drawing(path, len(units), 2.9) as panels:
        for axes, unit in zip(panels, units, strict=True):
            mine = [curve for curve in curves if curve["unit"] == unit]
            for place, curve in enumerate(mine):
                _curve(axes, curve, place)
            more = " (dotted: serial)" if name == "workers" else ""
            log_log(axes, f"{AXES[name].title}: {WORDS[unit]}{more}", AXES[name].letter, "")
            _upright(axes, unit, len(mine))
            axes.legend(loc="upper left")
            if name == "workers":
                axes.set_xticks(curves[0]["x"], [f"{x:g}" for x in curves[0]["x"]])
                axes.minorticks_off()


def _upright(axes: Any, unit: str, num_curves: int) -> None:
    """Two decades at least, so that what is flat looks flat; room for the legend; ticks in words."""
    low, high = axes.get_ylim()
    spare = max(1.0, (100 * low / high) ** 0.5)
    low, high = low / spare, high * spare
    axes.set_ylim(low, high * (high / low) ** (0.08 * num_curves))
    axes.yaxis.set_major_formatter(lambda value, place: quantity(value, unit))
    axes.yaxis.set_minor_formatter("")


def _curve(axes: Any, curve: dict[str, Any], place: int) -> None:
    """Points with their quartiles, and the fitted line over its range."""
    color, fit = COLORS[place], curve["fit"]
    error = "" if fit["error"] is None else f" ± {fit['error']:.2f}"
    label = f"{curve['name']}: {fit['exponent']:.2f}{error}".replace("-", "−")
    axes.plot(curve["x"], curve["y"], color=color, marker=MARKERS[place], linestyle="", label=label)
    if "low" in curve:
        axes.vlines(curve["x"], curve["low"], curve["high"], color=color, linewidth=1)
    ends = np.array([fit["from"], fit["to"]])
    axes.plot(ends, fit["scale"] * ends ** fit["exponent"], color=color, linewidth=1, alpha=0.8)
    if "serial" in curve:
        axes.axhline(curve["serial"], color=color, linestyle=":", linewidth=1)

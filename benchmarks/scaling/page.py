"""The numbers of docs/scaling.md, made from the results."""

from typing import Any

from benchmarks.derived import table
from benchmarks.scaling.axes import AXES, BYTES

Results = dict[str, Any]


def parts(results: Results) -> dict[str, str]:
    """One table an axis, the table of exponents, and the machine."""
    named = {
        name: f"{axis_table(results['axes'][name]['series'], axis.letter)}\n\nHeld fixed: {axis.fixed}."
        for name, axis in AXES.items()
    }
    return {"exponents": summary(results), **named, "machine": made_on(results)}


def summary(results: Results) -> str:
    rows = []
    for name, axis in results["axes"].items():
        for curve in axis["series"]:
            fit = curve["fit"]
            error = "" if fit["error"] is None else f" ± {fit['error']:.2f}"
            over = f"{count(fit['from'])} … {count(fit['to'])}"
            ends = f"{quantity(curve['y'][0], curve['unit'])} → {quantity(curve['y'][-1], curve['unit'])}"
            exponent = f"{fit['exponent']:.2f}{error}".replace("-", "−")
            rows.append([AXES[name].letter, curve["name"], curve["unit"], ends, over, exponent])
    head = ["grows", "of", "unit", "from the first point to the last", "fitted over", "exponent ± s.e."]
    return table(head, rows)


def axis_table(curves: list[dict[str, Any]], letter: str) -> str:
    """A row for every x, a column for every curve."""
    places = sorted({x for curve in curves for x in curve["x"]})
    rows = []
    for x in places:
        known = [dict(zip(curve["x"], curve["y"], strict=True)).get(x) for curve in curves]
        rows.append([count(x), *(_cell(y, curve["unit"]) for y, curve in zip(known, curves, strict=True))])
    return table([letter, *(f"{curve['name']}, {_measure(curve)}" for curve in curves)], rows)


def _measure(curve: dict[str, Any]) -> str:
    serial = f" (serial {quantity(curve['serial'], curve['unit'])})" if "serial" in curve else ""
    return ("memory" if curve["unit"] == BYTES else curve["unit"].replace("s per", "time per")) + serial


def _cell(value: float | None, unit: str) -> str:
    return "" if value is None else quantity(value, unit)


def count(value: float) -> str:
    return f"{value:,.0f}"


def quantity(value: float, unit: str) -> str:
    """Three digits with a unit that suits them."""
    steps = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")] if unit == BYTES else [(1, "s"), (1e-3, "ms"), (1e-6, "µs")]
    scale, name = next((step for step in steps if value >= 0.9999 * step[0]), steps[-1])
    return f"{value / scale:.3g} {name}"


def made_on(results: Results) -> str:
    """With how busy the machine was: ratios stand some of it, times do not."""
    made, axes = results["made"], results["axes"].values()
    seconds, load = sum(axis["seconds"] for axis in axes), max(axis.get("load", 0.0) for axis in axes)
    where = f"{made['cores']}, Python {made['python']}, torch {made['torch']}, one thread"
    busy = f" The machine's load was up to {load:g} before an axis began: others were at work." if load > 1.5 else ""
    return f"`python -m benchmarks.scaling`: {seconds} s on {where}.{busy}"

"""Exports the figures of a report as PNG and SVG with matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedecho.report.page import MissingExtra
from fedecho.report.spec import STALENESS, Bars, Curve, Dots, Figure, HeatMap, Report, Spans

LONG = 48
"""The total length of bar names, in characters, above which bars are drawn horizontally."""


def write_figures(report: Report, folder: Path, progress: Callable[[str], None] = lambda slug: None) -> list[Path]:
    """Write ``SLUG.png`` (300 dpi) and ``SLUG.svg`` of every figure; needs no display."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        raise MissingExtra("--figures needs matplotlib: pip install 'fedecho[report]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(
        {
            "font.size": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": "fedecho",
            "svg.fonttype": "none",
        }
    ):
        for figure in report.figures:
            progress(figure.slug)
            below = 0.15 * len(_long_legend(figure))
            wide = figure.wide or _is_horizontal(figure)
            size = (7.2, min(9.0, figure.height / 110)) if wide else (3.6, 2.5 + below)
            drawing = Drawing(figsize=size, layout="constrained")
            FigureCanvasAgg(drawing)
            draw(figure, drawing.add_subplot())
            for kind in ("png", "svg"):
                path = folder / f"{figure.slug}.{kind}"
                drawing.savefig(path, dpi=300, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
    return written


def draw(figure: Figure, axes: Any) -> None:
    drawn: dict[type[Any], Callable[[Any, Figure, Any], None]] = {
        Curve: _curve,
        Dots: _dots,
        HeatMap: _heat_map,
        Spans: _spans,
    }
    bars = [mark for mark in figure.marks if isinstance(mark, Bars)]
    for mark in figure.marks:
        if type(mark) in drawn:
            drawn[type(mark)](mark, figure, axes)
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    if bars:
        (_horizontal_bars if _is_horizontal(figure) else _bars)(bars, figure, axes)
    axes.set_title(figure.title, fontsize=8, loc="left", pad=14 if any(isinstance(mark, Spans) for mark in figure.marks) else 6)
    if figure.percent and not any(isinstance(mark, HeatMap) for mark in figure.marks):
        axes.yaxis.set_major_formatter(lambda value, place: f"{100 * value:.0f} %")
    if _long_legend(figure):
        axes.figure.legend(loc="outside lower left", frameon=False, fontsize=7)
    elif len(_legend(figure)) > 1:
        axes.legend(frameon=False, fontsize=7)


def _legend(figure: Figure) -> list[str]:
    marks = [mark for mark in figure.marks if isinstance(mark, Curve | Dots | Bars)]
    return [mark.name for mark in marks if not (isinstance(mark, Curve) and mark.is_reference)]


def _long_legend(figure: Figure) -> list[str]:
    """The names of a legend too large for the plot, which is placed below it."""
    names = _legend(figure)
    return names if len(names) > 1 and (len(names) > 5 or max(map(len, names)) > 24) else []


def _curve(mark: Curve, figure: Figure, axes: Any) -> None:
    style = {"color": mark.color, "linestyle": "--" if mark.dash else "-", "linewidth": 0.8 if mark.is_reference else 1.4}
    marker = {"marker": "o"} if len(mark.x) == 1 else {}  # a single point is drawn as a marker
    axes.plot(mark.x, mark.y, label=None if mark.is_reference else mark.name, **style, **marker)
    if mark.low is not None:
        axes.fill_between(mark.x, mark.low, mark.high, color=mark.color, alpha=0.18, linewidth=0)


def _dots(mark: Dots, figure: Figure, axes: Any) -> None:
    axes.scatter(mark.x, mark.y, s=14, color=mark.color, alpha=0.75, linewidths=0, label=mark.name)


def _bars(marks: list[Bars], figure: Figure, axes: Any) -> None:
    places = np.arange(len(marks[0].x))
    width, floor = 0.8 if figure.stacked else 0.8 / len(marks), np.zeros(len(places))
    for number, mark in enumerate(marks):
        left = places if figure.stacked else places - 0.4 + (number + 0.5) * width
        axes.bar(left, mark.y, width, bottom=floor if figure.stacked else None, color=mark.color, label=mark.name)
        floor = floor + mark.y
    many = len(places) > 8
    axes.set_xticks(places, marks[0].x, rotation=60 if many else 0, fontsize=6 if many else 8)


def _horizontal_bars(marks: list[Bars], figure: Figure, axes: Any) -> None:
    floor = np.zeros(len(marks[0].x))
    for mark in marks:
        axes.barh(list(mark.x), mark.y, 0.8, left=floor, color=mark.color, label=mark.name)
        floor = floor + mark.y
    axes.invert_yaxis()
    axes.set(xlabel=figure.y_label, ylabel=figure.x_label)


def _is_horizontal(figure: Figure) -> bool:
    """Stacked bars with long names are horizontal, so that the names are readable."""
    return figure.stacked and any(sum(map(len, mark.x)) > LONG for mark in figure.marks if isinstance(mark, Bars))


def _heat_map(mark: HeatMap, figure: Figure, axes: Any) -> None:
    numeric = isinstance(mark.x, np.ndarray)
    across = (float(mark.x[0]), float(mark.x[-1])) if isinstance(mark.x, np.ndarray) else (-0.5, len(mark.x) - 0.5)
    extent = (*across, len(mark.y) - 0.5, -0.5)
    image = axes.imshow(mark.z, aspect="auto", extent=extent, vmin=0, vmax=mark.z_max, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=mark.unit)
    axes.set_yticks(range(len(mark.y)), mark.y, fontsize=6 if len(mark.y) > 20 else 8)
    if not numeric and len(mark.x) <= 20:
        axes.set_xticks(range(len(mark.x)), mark.x)
    if mark.annotated:
        for (row, column), value in np.ndenumerate(mark.z):
            ink = "white" if value < 0.6 * (mark.z_max or np.nanmax(mark.z)) else "black"
            axes.text(
                column, row, f"{100 * value:.0f}" if figure.percent else f"{value:.2g}", ha="center", va="center", color=ink
            )


def _spans(mark: Spans, figure: Figure, axes: Any) -> None:
    status = np.array(mark.status)
    for low, high, color in STALENESS:
        behind = (mark.staleness >= low) & (mark.staleness <= (np.inf if high is None else high))
        chosen = (status == "accepted") & behind
        if chosen.any():
            label = f"staleness {low}" if high == low else f"staleness {low}+" if high is None else f"staleness {low} to {high}"
            axes.hlines(mark.row[chosen], mark.start[chosen], mark.end[chosen], colors=color, linewidth=3, label=label)
    for name, ink, ending in (("in progress", "0.75", ""), ("lost", "0.5", "x"), ("rejected", "red", "x")):
        mine = status == name
        if mine.any():
            axes.hlines(mark.row[mine], mark.start[mine], mark.end[mine], colors=ink, linewidth=1, label=name)
            axes.plot(mark.end[mine], mark.row[mine], color=ink, marker=ending, markersize=3, linestyle="")
    axes.legend(frameon=False, fontsize=6, ncols=9, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    axes.set_yticks(range(len(mark.rows)), mark.rows, fontsize=6)
    axes.set_ylim(len(mark.rows) - 0.4, -0.6)

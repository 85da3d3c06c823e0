"""Plots for the docs in the style of the report's figures: page width, small letters, no frame, text as text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedecho.report.spec import PALETTE

COLORS = PALETTE
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.hashsalt": "fedecho",
    "svg.fonttype": "none",
}


@contextmanager
def drawing(path: Path, panels: int = 1, height: float = 2.7) -> Iterator[Any]:
    """Axes side by side, written to ``path`` at the end. No window on any screen."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(1, panels, squeeze=False)[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def plain_ticks(axis: Any, places: list[float] | None = None) -> None:
    """0.02, 0.05, 0.1 instead of powers of ten, for axes of few decades; or exactly ``places``."""
    from matplotlib.ticker import FixedLocator, LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if places is None else FixedLocator(places))
    axis.set_major_formatter(lambda value, place: f"{value:g}")
    axis.set_minor_formatter("")


def log_log(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
    axes.set_title(title)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.4)

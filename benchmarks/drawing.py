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


def log_log(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
    axes.set_title(title)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.4)

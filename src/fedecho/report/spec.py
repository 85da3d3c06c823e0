"""The content of a report, independent of how it is drawn: shared by the HTML page and the exported figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLASS_COLORS = {"short": "#2a9d8f", "medium": "#e0a030", "long": "#d1495b"}
PALETTE = ("#3b7dd8", "#e07b39", "#1f9e77", "#b4529e", "#8a6d3b", "#d1495b", "#5a9bd5", "#7a7a7a")
"""Distinguishable with most forms of color blindness, on light and dark backgrounds."""

STALENESS = (
    (0, 0, "#2a9d8f"),
    (1, 2, "#6fb06a"),
    (3, 5, "#b9b03c"),
    (6, 10, "#e39a35"),
    (11, 20, "#d96a3a"),
    (21, None, "#b83a5e"),
)
"""Bins of staleness: lowest and highest number of versions (None: no upper limit) and their color."""


def color_of(name: str, index: int) -> str:
    """The fixed color of a runtime class, or the palette color at ``index`` for any other name."""
    return CLASS_COLORS.get(name, PALETTE[index % len(PALETTE)])


@dataclass(frozen=True)
class Curve:
    """A curve, with a band from the lowest to the highest seed if there are several."""

    name: str
    x: Floats
    y: Floats
    color: str
    low: Floats | None = None
    high: Floats | None = None
    dash: bool = False
    is_reference: bool = False
    """A thin line for comparison, without a legend entry or hover text."""


@dataclass(frozen=True)
class Dots:
    name: str
    x: Floats
    y: Floats
    color: str
    text: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    name: str
    x: Sequence[str]
    y: Floats
    color: str


@dataclass(frozen=True)
class HeatMap:
    """A heat map. With ``annotated``, values are printed in the cells; ``hover`` holds further values for the hover text."""

    x: Sequence[str] | Floats
    y: Sequence[str]
    z: Floats
    unit: str
    annotated: bool = False
    hover: dict[str, Floats] = field(default_factory=dict)
    z_max: float | None = None


@dataclass(frozen=True)
class Spans:
    """Jobs on a timeline: row, start, end, base version, staleness and outcome of each."""

    rows: Sequence[str]
    row: Ints
    start: Floats
    end: Floats
    base: Ints
    staleness: Ints
    status: Sequence[str]


Mark = Curve | Dots | Bars | HeatMap | Spans


@dataclass(frozen=True)
class Figure:
    """One plot. ``slug`` is its file name and HTML id, ``note`` its caption."""

    slug: str
    title: str
    x_label: str
    y_label: str
    marks: Sequence[Mark]
    note: str = ""
    wide: bool = False
    percent: bool = False
    """y is a fraction, shown in percent."""
    stacked: bool = False
    height: int = 340


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page. ``missing`` lists what is left out, with the reason."""

    slug: str
    title: str
    intro: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[tuple[str, str]] = ()
    """Collapsible plain text: (heading, text)."""
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    title: str
    subtitle: str
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]

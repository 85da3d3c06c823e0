"""What a report is made of, before anything is drawn: one description for the page and for a paper's figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLASS_COLORS = {"short": "#2a9d8f", "medium": "#e0a030", "long": "#d1495b"}
PALETTE = ("#3b7dd8", "#e07b39", "#1f9e77", "#b4529e", "#8a6d3b", "#d1495b", "#5a9bd5", "#7a7a7a")
"""Told apart by most eyes, on white and on black."""

STALENESS = (
    (0, 0, "#2a9d8f"),
    (1, 2, "#6fb06a"),
    (3, 5, "#b9b03c"),
    (6, 10, "#e39a35"),
    (11, 20, "#d96a3a"),
    (21, None, "#b83a5e"),
)
"""From and to how many versions behind (None: any more), and the color of such jobs."""


def color_of(name: str, place: int) -> str:
    """Runtime classes keep their colors from report to report; methods take theirs by place."""
    return CLASS_COLORS.get(name, PALETTE[place % len(PALETTE)])


@dataclass(frozen=True)
class Line:
    """A curve, with the span over seeds around it where there are several."""

    name: str
    x: Floats
    y: Floats
    color: str
    low: Floats | None = None
    high: Floats | None = None
    dash: bool = False
    quiet: bool = False
    """A line to compare with: it has no place in the legend and does not answer the mouse."""


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
class Heat:
    """A table of colors. ``shown`` is written into the cells; ``told`` are named numbers for the mouse."""

    x: Sequence[str] | Floats
    y: Sequence[str]
    z: Floats
    unit: str
    shown: bool = False
    told: dict[str, Floats] = field(default_factory=dict)
    high: float | None = None


@dataclass(frozen=True)
class Spans:
    """Jobs of clients: who trained from when to when, on which version, how stale, and what became of it."""

    rows: Sequence[str]
    row: Ints
    start: Floats
    end: Floats
    base: Ints
    staleness: Ints
    status: Sequence[str]


Mark = Line | Dots | Bars | Heat | Spans


@dataclass(frozen=True)
class Figure:
    """One drawing. ``slug`` names its file; ``note`` says how to read it."""

    slug: str
    title: str
    x_label: str
    y_label: str
    marks: Sequence[Mark]
    note: str = ""
    wide: bool = False
    percent: bool = False
    """y is a share of 1 and is shown in percent."""
    stacked: bool = False
    height: int = 340


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A chapter of the page. ``missing`` says which figures are left out and why."""

    slug: str
    title: str
    intro: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[tuple[str, str]] = ()
    """Headings with plain text below that opens on a click."""
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    title: str
    subtitle: str
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]

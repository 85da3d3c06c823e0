"""Converts figures to the JSON that plotly.js draws."""

from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np

from fedecho.report.spec import STALENESS, Bars, Curve, Dots, Figure, Floats, HeatMap, Mark, Spans

Json = dict[str, Any]
DIGITS = 5


def figure_json(figure: Figure) -> Json:
    """Traces and layout of a figure. Spans are sent as columns; the page turns them into traces."""
    convert: dict[type[Any], Callable[[Any, Figure], list[Json]]] = {
        Curve: _curve,
        Dots: _dots,
        Bars: _bars,
        HeatMap: _heat_map,
    }
    traces = [trace for mark in figure.marks if type(mark) in convert for trace in convert[type(mark)](mark, figure)]
    spans = [_spans(mark) for mark in figure.marks if isinstance(mark, Spans)]
    return {"slug": figure.slug, "traces": traces, "layout": _layout(figure), "spans": spans}


def numbers(values: Any) -> list[Any]:
    """Rounds to five digits, more than a screen can show; NaN and infinity become null."""
    if getattr(values, "ndim", 1) > 1:
        return [numbers(row) for row in values]
    return [_short(float(value)) for value in values]


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _layout(figure: Figure) -> Json:
    y: Json = {"title": {"text": figure.y_label, "standoff": 12}, "automargin": True}
    x: Json = {"title": {"text": figure.x_label, "standoff": 8}, "automargin": True}
    heat, spans = _has(figure, HeatMap), _has(figure, Spans)
    if heat or spans:
        y |= {"autorange": "reversed", "showgrid": False}
        x |= {"showgrid": not heat}
    elif figure.percent:
        y["tickformat"] = ".2~%"
        y["autorangeoptions"] = {"minallowed": -0.03, "maxallowed": 1.03}  # autorange of a single point would reach 150 %
    if heat and not _has(figure, Spans):
        y["type"] = "category"
        first = next(mark for mark in figure.marks if isinstance(mark, HeatMap))
        x |= {} if isinstance(first.x, np.ndarray) else {"type": "category"}
    if _has(figure, Bars):
        x["type"] = "category"
    has_curves = _has(figure, Curve) and not _has(figure, Dots)
    layout: Json = {"xaxis": x, "yaxis": y, "height": figure.height, "hovermode": "x unified" if has_curves else "closest"}
    if figure.stacked:
        layout["barmode"] = "stack"
    return layout


def _has(figure: Figure, kind: type[Mark]) -> bool:
    return any(isinstance(mark, kind) for mark in figure.marks)


def _curve(mark: Curve, figure: Figure) -> list[Json]:
    x = numbers(mark.x)
    is_single = len(x) == 1  # a single point is drawn as a marker
    shared: Json = {"x": x, "type": "scatter", "mode": "markers" if is_single else "lines", "legendgroup": mark.name}
    hover = "%{y:.1%}" if figure.percent else "%{y:.4~g}"
    stroke: Json = {"color": mark.color, "width": 1 if mark.is_reference else 2, "dash": "dash" if mark.dash else "solid"}
    main = shared | {"name": escape(mark.name), "y": numbers(mark.y), "line": stroke, "hovertemplate": hover}
    main |= {"marker": {"color": mark.color, "size": 8}} if is_single else {}
    if mark.is_reference:
        main |= {"showlegend": False, "hoverinfo": "skip", "hovertemplate": None}
    if mark.low is None or mark.high is None:
        return [main]
    silent = shared | {"showlegend": False, "hoverinfo": "skip", "line": {"width": 0, "color": mark.color}}
    low = silent | {"y": numbers(mark.low)}
    high = silent | {"y": numbers(mark.high), "fill": "tonexty", "fillcolor": _faint(mark.color)}
    return [low, high, main]


def _faint(color: str) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def _dots(mark: Dots, figure: Figure) -> list[Json]:
    marker = {"color": mark.color, "size": 8, "opacity": 0.75}
    hover = "%{text}<br>%{x:.3~g}, " + ("%{y:.1%}" if figure.percent else "%{y:.4~g}")
    trace = {"type": "scatter", "mode": "markers", "name": escape(mark.name), "x": numbers(mark.x), "y": numbers(mark.y)}
    return [trace | {"marker": marker, "text": [escape(text) for text in mark.text], "hovertemplate": hover}]


def _bars(mark: Bars, figure: Figure) -> list[Json]:
    hover = "%{x}: " + ("%{y:.1%}" if figure.percent else "%{y:.4~g}")
    trace = {
        "type": "bar",
        "name": escape(mark.name),
        "x": [escape(label) for label in mark.x],
        "y": numbers(mark.y),
        "marker": {"color": mark.color},
    }
    return [trace | {"hovertemplate": hover}]


def _heat_map(mark: HeatMap, figure: Figure) -> list[Json]:
    value = "%{z:.1%}" if figure.percent else "%{z:.3~g}"
    hover = f"%{{y}}, {figure.x_label} %{{x}}<br>{mark.unit} {value}"
    bar = {"title": {"text": mark.unit, "side": "right"}, "thickness": 12, "outlinewidth": 0}
    if figure.percent:
        bar["tickformat"] = ".0%"
    x = numbers(mark.x) if isinstance(mark.x, np.ndarray) else list(mark.x)
    trace: Json = {"type": "heatmap", "x": x, "y": [escape(label) for label in mark.y], "z": numbers(mark.z), "colorbar": bar}
    trace |= {"colorscale": "Viridis", "zmin": 0, "hoverongaps": False, "xgap": 1 if mark.annotated else 0, "ygap": 1}
    if mark.z_max is not None:
        trace["zmax"] = mark.z_max
    if mark.annotated:
        trace |= {"texttemplate": "%{z:.0%}" if figure.percent else "%{z:.3~g}"}
    if mark.hover:
        trace["customdata"] = numbers(np.stack(list(mark.hover.values()), axis=-1))
        hover += "".join(f"<br>{name} %{{customdata[{index}]}}" for index, name in enumerate(mark.hover))
    return [trace | {"hovertemplate": hover + "<extra></extra>"}]


def _spans(mark: Spans) -> Json:
    columns: dict[str, Floats | Any] = {"row": mark.row, "start": mark.start, "end": mark.end}
    columns |= {"base": mark.base, "staleness": mark.staleness}
    plain = {"rows": [escape(label) for label in mark.rows], "status": list(mark.status), "bins": STALENESS}
    return plain | {name: numbers(values) for name, values in columns.items()}

"""Builds a report from run folders and renders it as a self-contained HTML page."""

import json
import re
import time
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedecho.report.accuracy import accuracy_section, classes_section, glance
from fedecho.report.clients import clients_section
from fedecho.report.distillation import echo_section
from fedecho.report.drawing import figure_json
from fedecho.report.inside import costs_section, origin_section
from fedecho.report.load import find_runs, read_run
from fedecho.report.methods import methods_of
from fedecho.report.spec import Figure, Report, Section, Table
from fedecho.version import __version__

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'"
)
"""Content security policy: the browser blocks all requests except those of a live page to its own server."""


class MissingExtra(ValueError):  # noqa: N818 (public name)
    """A package of an optional extra is not installed."""


def page(report: Report, *, live: bool = False) -> str:
    """The HTML document. A live page polls its server for ``report.json`` and redraws its figures."""
    data = json.dumps(figures_json(report), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    nav = "".join(f'<a href="#{section.slug}">{escape(section.title)}</a>' for section in report.sections)
    parts = {
        "policy": POLICY,
        "title": escape(f"FedEcho: {report.title}"),
        "heading": escape(report.title),
        "subtitle": page_subtitle(report),
        "nav": nav,
        "sections": "\n".join(_section(section) for section in report.sections),
        "live": "true" if live else "false",
        "style": _part("page.css"),
        "script": _part("page.js"),
        "plotly": plotly_js(),
        "data": data,
    }
    # A single pass, because the inserted parts may contain double braces.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def page_subtitle(report: Report) -> str:
    return escape(f"{report.subtitle} · fedecho {__version__} · {time.strftime('%Y-%m-%d %H:%M')}")


def figures_json(report: Report) -> list[dict[str, Any]]:
    return [figure_json(figure) for figure in report.figures]


def tables_html(section: Section) -> str:
    """The part of a section that a live page replaces when it refreshes."""
    missing = "".join(f'<p class="missing">Left out: {escape(text)}.</p>' for text in section.missing)
    return "".join(_table(table) for table in section.tables) + missing


def plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtra("the report page needs plotly: pip install 'fedecho[report]'") from None
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _part(name: str) -> str:
    return files("fedecho.report").joinpath("page", name).read_text(encoding="utf-8")


def _section(section: Section) -> str:
    intro = f"<p>{escape(section.intro)}</p>" if section.intro and (section.figures or section.tables) else ""
    figures = "".join(_figure(figure) for figure in section.figures)
    details = "".join(
        f"<details><summary>{escape(head)}</summary><pre>{escape(text)}</pre></details>" for head, text in section.details
    )
    return (
        f'<section id="{section.slug}"><h2>{escape(section.title)}</h2>{intro}'
        f'<div class="figures">{figures}</div><div class="tables">{tables_html(section)}</div>{details}</section>'
    )


def _figure(figure: Figure) -> str:
    kind = ' class="wide"' if figure.wide else ""
    note = f"<figcaption>{escape(figure.note)}</figcaption>" if figure.note else ""
    return (
        f'<figure{kind}><h3>{escape(figure.title)}</h3><div class="plot" id="{figure.slug}" role="img" '
        f'aria-label="{escape(figure.title)}" style="height:{figure.height}px"></div>{note}</figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'


def report_of(places: Iterable[Path]) -> Report:
    """The report on all runs in and below ``places``."""
    runs = [read_run(folder) for folder in find_runs(places)]
    methods = methods_of(runs)
    sections = [
        glance(methods),
        accuracy_section(methods),
        classes_section(methods),
        clients_section(methods),
        echo_section(methods),
        costs_section(methods),
        origin_section(methods),
    ]
    names = sorted({str(run.header.get("name", run.folder.name)) for run in runs})
    repeated = sum(len(method.repeated) for method in methods)
    subtitle = f"{len(methods)} method{'s' if len(methods) > 1 else ''}, {len(runs)} run{'s' if len(runs) > 1 else ''}"
    subtitle += f" ({repeated} repeated run{'s' if repeated > 1 else ''} left out)" if repeated else ""
    return Report(", ".join(names), subtitle, [section for section in sections if section is not None])

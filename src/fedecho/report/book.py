"""From run folders to a report: which chapters there are, in which order."""

from collections.abc import Iterable
from pathlib import Path

from fedecho.report.accuracy import accuracy_section, glance
from fedecho.report.classes import classes_section
from fedecho.report.clients import clients_section
from fedecho.report.costs import costs_section
from fedecho.report.echo import echo_section
from fedecho.report.load import RunData, find_runs, read_run
from fedecho.report.methods import methods_of
from fedecho.report.origin import origin_section
from fedecho.report.spec import Report


def report_of(places: Iterable[Path]) -> Report:
    return written([read_run(folder) for folder in find_runs(places)])


def written(runs: list[RunData]) -> Report:
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
    many = f"{len(methods)} method{'s' if len(methods) > 1 else ''}, {len(runs)} run{'s' if len(runs) > 1 else ''}"
    many += f" ({repeated} repeated and left out)" if repeated else ""
    return Report(", ".join(names), many, [section for section in sections if section is not None])

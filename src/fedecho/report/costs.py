"""What the server pays: seconds by version, versions and bytes held."""

import numpy as np

from fedecho.report.load import RunData
from fedecho.report.methods import Method, having
from fedecho.report.spec import Bars, Figure, Line, Section, Table

SHARES = (("clients", "#3b7dd8"), ("server", "#e07b39"), ("evaluation and record", "#9a9a9a"))


def costs_section(methods: list[Method]) -> Section:
    timed, without = having(methods, lambda run: _seconds(run) is not None)
    figures = [_time(timed), *_alive(timed)] if timed else []
    missing = (
        [f"seconds of server and clients of {without} runs: their records do not say where the time went"] if without else []
    )
    intro = (
        "Clients: waiting for them, which in one process is their training. Server: admission, the method's step, teachers' "
        "inference and distillation. On a GPU a call returns before its work is done, and the border between the two is blurred."
    )
    return Section("server", "Server", intro, figures, [_memory(methods)], missing=missing)


def _seconds(run: RunData) -> tuple[float, float, float] | None:
    """Of a version: clients, server, the rest."""
    if not run.evaluations or "server_s" not in run.evaluations[-1]:
        return None
    last = run.evaluations[-1]
    versions = max(int(last["version"]), 1)
    rest = max(last["real_s"] - last["clients_s"] - last["server_s"], 0.0)
    return last["clients_s"] / versions, last["server_s"] / versions, rest / versions


def _time(methods: list[Method]) -> Figure:
    labels = [method.label for method in methods]
    table = np.array([np.mean([s for run in method.runs if (s := _seconds(run)) is not None], axis=0) for method in methods])
    marks = [Bars(name, labels, 1e3 * table[:, place], color) for place, (name, color) in enumerate(SHARES)]
    note = "Mean over the run and over seeds."
    return Figure("server-time", "Where a version's time goes", "", "milliseconds a version", marks, note, stacked=True)


def _alive(methods: list[Method]) -> list[Figure]:
    lines: list[Line] = []
    for method in methods:
        found = method.line([(run.column("version"), run.column("versions_alive")) for run in method.runs])
        if found is not None and not np.isnan(found.y).any():
            lines.append(found)
    note = "Models that somebody still trains from; the server must hold them all."
    return [Figure("versions-alive", "Versions alive", "version", "models held", lines, note)] if lines else []


def _memory(methods: list[Method]) -> Table:
    rows = []
    for method in methods:
        run = method.runs[0]
        size = 4 * run.header.get("num_params", 0)
        summary, last = run.summary, run.evaluations[-1] if run.evaluations else {}
        alive = summary.peak_versions_alive if summary else 0
        peak = last.get("peak_bytes")
        rows.append(
            [
                method.label,
                f"{int(run.header.get('num_params', 0)):,}",
                str(alive) if alive else "",
                _megabytes(alive * size) if alive else "",
                _megabytes(summary.bank_bytes) if summary else "",
                _megabytes(peak) if peak else "",
            ]
        )
    note = "MB. The process's peak includes the data, PyTorch and, in one process, the clients' training."
    return Table(
        ("method", "parameters", "most versions alive", "these, MB", "bank of logits, MB", "process's peak, MB"), rows, note
    )


def _megabytes(size: float) -> str:
    if 0 < size < 1e4:
        return f"{size / 1e6:.2g}"
    return f"{size / 1e6:,.2f}" if size < 1e7 else f"{size / 1e6:,.0f}"

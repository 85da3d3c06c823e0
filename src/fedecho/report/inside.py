"""The sections on the server's costs and on the provenance of the runs."""

import json
from collections import Counter
from typing import Any

import numpy as np

from fedecho.report.load import RunData
from fedecho.report.methods import Method, having
from fedecho.report.spec import Bars, Curve, Figure, Section, Table

SHARES = (("clients", "#3b7dd8"), ("server", "#e07b39"), ("evaluation and recording", "#9a9a9a"))


def costs_section(methods: list[Method]) -> Section:
    timed, without = having(methods, lambda run: _seconds(run) is not None)
    figures = [_time(timed), *_alive(timed)] if timed else []
    missing = (
        [f"time per version for {'1 run' if without == 1 else f'{without} runs'} (no timings are recorded)"] if without else []
    )
    intro = (
        "“Clients” is the time spent waiting for clients; in a single process that is their training time. “Server” covers "
        "admission, the method's step, teacher inference and distillation. GPU calls return before their work is done, so on a "
        "GPU the split is approximate."
    )
    return Section("server", "Server", intro, figures, [_memory(methods)], missing=missing)


def _seconds(run: RunData) -> tuple[float, float, float] | None:
    """Mean seconds per version: clients, server and the rest."""
    if not run.evaluations or "server_s" not in run.evaluations[-1]:
        return None
    last = run.evaluations[-1]
    versions = max(int(last["version"]), 1)
    rest = max(last["real_s"] - last["clients_s"] - last["server_s"], 0.0)
    return last["clients_s"] / versions, last["server_s"] / versions, rest / versions


def _time(methods: list[Method]) -> Figure:
    labels = [method.label for method in methods]
    table = np.array([np.mean([s for run in method.runs if (s := _seconds(run)) is not None], axis=0) for method in methods])
    marks = [Bars(name, labels, 1e3 * table[:, index], color) for index, (name, color) in enumerate(SHARES)]
    note = "Mean over all versions and seeds."
    return Figure("server-time", "Time per version", "", "milliseconds per version", marks, note, stacked=True)


def _alive(methods: list[Method]) -> list[Figure]:
    curves: list[Curve] = []
    for method in methods:
        curve = method.curve([(run.column("version"), run.column("versions_alive")) for run in method.runs])
        if curve is not None and not np.isnan(curve.y).any():
            curves.append(curve)
    note = "Model versions that some client is still training from. The server keeps all of them in memory."
    return [Figure("versions-alive", "Versions in memory", "version", "versions in memory", curves, note)] if curves else []


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
    note = "Peak process memory includes the data, PyTorch and, in a single process, the clients' training."
    head = ("method", "parameters", "most versions in memory", "their size (MB)", "logit bank (MB)", "peak process memory (MB)")
    return Table(head, rows, note)


def _megabytes(size: float) -> str:
    if 0 < size < 1e4:
        return f"{size / 1e6:.2g}"
    return f"{size / 1e6:,.2f}" if size < 1e7 else f"{size / 1e6:,.0f}"


SOFTWARE = ("fedecho", "python", "torch", "numpy", "platform")


def origin_section(methods: list[Method]) -> Section:
    rows = []
    for method in methods:
        rows += [_provenance(method, run) for run in method.runs]
        rows += [_provenance(method, run, " (repeated)") for run in method.repeated]
    details = [(f"Configuration: {method.label}, seed {method.runs[0].seed}", _config(method)) for method in methods]
    tables = [*_settings(methods), Table(("method", "seed", "started", "command", "folder"), rows)]
    tables += [_environment(methods), *_notes(methods)]
    return Section("origin", "Provenance", tables=tables, details=details)


def _provenance(method: Method, run: RunData, remark: str = "") -> list[str]:
    return [
        method.label,
        f"{run.seed}{remark}",
        str(run.header.get("started", "")),
        str(run.header.get("command", "")),
        str(run.folder),
    ]


def _settings(methods: list[Method]) -> list[Table]:
    """All settings that differ between methods of one name, if their labels cannot list them all."""
    shortened = [method for method in methods if method.name.num_omitted]
    names = list(dict.fromkeys(name for method in shortened for name in method.name.settings))
    rows = [[method.label, *(method.name.settings.get(name, "") for name in names)] for method in shortened]
    return [Table(("method", *names), rows, "All settings that differ between methods of the same name.")] if shortened else []


def _config(method: Method) -> str:
    header = method.runs[0].header
    config, parts = header.get("config"), header.get("parts")
    if config is not None:
        return "\n".join(_toml(config))
    lines = ["# This run used a custom task or method, which cannot be rebuilt from the record. Its recorded attributes:"]
    attributes = [f"{json.dumps(name)} = {_value(value)}" for name, value in (header.get("attributes") or {}).items()]
    return "\n".join([*lines, *_toml(parts or {}), *(["", "[attributes]", *attributes] if attributes else [])])


def _toml(tree: dict[str, Any], path: str = "") -> list[str]:
    """The lines of a configuration file for ``fedecho run``."""
    lines = [f"{key} = {_value(value)}" for key, value in tree.items() if value is not None and not isinstance(value, dict)]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", f"[{path}{key}]", *_toml(value, f"{path}{key}.")]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    # By default JSON escapes emoji as surrogate pairs, which TOML does not allow. TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _notes(methods: list[Method]) -> list[Table]:
    """Notes of the tasks: the model and its files, the prompt, stand-ins for data that is missing."""
    seen = Counter(note for method in methods for run in method.runs for note in run.notes.items())
    rows = [[name, text, str(count)] for (name, text), count in sorted(seen.items())]
    return [Table(("task note", "text", "runs"), rows)] if rows else []


def _environment(methods: list[Method]) -> Table:
    """One row for each combination of software and execution."""
    seen: dict[tuple[str, ...], int] = {}
    for run in (run for method in methods for run in method.runs):
        software, execution = run.header.get("software", {}), run.header.get("execution", {})
        how = ", ".join(f"{key} {value}" for key, value in execution.items())
        more = ", ".join(f"{name} {version}" for name, version in software.items() if name not in SOFTWARE)
        row = (*(str(software.get(name, "")) for name in SOFTWARE), more, how)
        seen[row] = seen.get(row, 0) + 1
    rows = [[*row, str(count)] for row, count in seen.items()]
    return Table((*SOFTWARE, "other software", "execution", "runs"), rows)

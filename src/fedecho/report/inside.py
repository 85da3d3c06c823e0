"""FedEcho's teachers and student over time, what the server pays, and where the runs came from."""

import json
from collections import Counter
from typing import Any

import numpy as np

from fedecho.report.clients import MOST_CLIENTS, order_of
from fedecho.report.load import RunData
from fedecho.report.methods import Method, having
from fedecho.report.spec import Bars, Figure, Heat, Line, Section, Table

METRICS = (
    ("teacher_entropy", "Teacher entropy", "H, 0 certain to 1 uniform", "The mean entropy of the mean teacher on U."),
    ("soft_weight", "Soft weight", "alpha", "How much of the loss copies the teacher softly; the rest takes its labels."),
    ("distillation_loss", "Distillation loss", "mean over a version's steps", ""),
    ("clipped_share", "Clipping", "share of steps clipped", "How many of the distillation's gradients were longer than nu."),
    ("distill_grad_norm", "Gradient of the distillation", "norm before clipping", ""),
    ("teacher_age", "Mean age of the teachers", "versions", "How long ago clients were heard last, on average."),
)
COLUMNS = 160


def echo_section(methods: list[Method]) -> Section | None:
    """None where no run distilled."""
    teaching = [method for method in methods if any("num_teachers" in line for run in method.runs for line in run.versions[:1])]
    if not teaching:
        return None
    figures = []
    for name, title, y_label, note in METRICS:
        lines = [line for method in teaching if (line := method.line([run.metric(name) for run in method.runs])) is not None]
        if lines:
            figures.append(Figure(f"echo-{name.replace('_', '-')}", title, "version", y_label, lines, note, height=270))
    run = teaching[0].runs[0]
    if run.every > 1:
        missing = [f"how old each teacher is: the record is a sample, one job in {run.every:,}"]
        return Section("echo", "Inside FedEcho", figures=figures, missing=missing)
    ages = _ages(teaching[0], run)
    return Section("echo", "Inside FedEcho", figures=[*figures, ages] if ages else figures)


def _ages(method: Method, run: RunData) -> Figure | None:
    """By client and version: how many versions ago it was heard last, white before it was heard at all."""
    if not run.versions or not run.jobs.accepted.any():
        return None
    last_version = int(run.versions[-1]["version"])
    shown = np.unique(np.linspace(1, last_version, min(COLUMNS, last_version)).astype(int))
    accepted = run.jobs.accepted
    client, heard = run.jobs.client[accepted], (run.jobs.base + run.jobs.staleness)[accepted]
    rows = _chosen(run)
    table = np.full((len(rows), len(shown)), np.nan)
    for row, who in enumerate(rows):
        mine = np.sort(heard[client == who])
        place = np.searchsorted(mine, shown, side="left") - 1  # heard at version v speaks from v + 1 on
        known = place >= 0
        table[row, known] = shown[known] - 1 - mine[place[known]]
    labels = [f"{run.classes[who] if run.classes else ''} {who}".strip() for who in rows]
    note = "A bright row is a teacher that speaks with an old voice; empty until a client is heard for the first time."
    if len(rows) < run.num_clients:
        note += f" {len(rows)} of {run.num_clients:,} clients are drawn."
    heat = Heat(shown.astype(np.float64), labels, table, "age, versions")
    title = f"How old each teacher is ({method.label}, seed {run.seed})"
    return Figure("teacher-ages", title, "version", "client", [heat], note, wide=True, height=160 + 13 * len(rows))


def _chosen(run: RunData) -> list[int]:
    """All clients, slowest class first; of very many, as many of each class as its share."""
    order = order_of(run)
    kept = np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_CLIENTS)).astype(int))
    return [int(client) for client in order[kept]]


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


SOFTWARE = ("fedecho", "python", "torch", "numpy", "platform")


def origin_section(methods: list[Method]) -> Section:
    rows = []
    for method in methods:
        rows += [_made(method, run) for run in method.runs]
        rows += [_made(method, run, ", left out") for run in method.repeated]
    details = [(f"Configuration of {method.label}, seed {method.runs[0].seed}", _config(method)) for method in methods]
    tables = [*_settings(methods), Table(("method", "seed", "started", "command", "folder"), rows)]
    tables += [_environment(methods), *_notes(methods)]
    return Section("origin", "How it was made", tables=tables, details=details)


def _made(method: Method, run: RunData, fate: str = "") -> list[str]:
    return [
        method.label,
        f"{run.seed}{fate}",
        str(run.header.get("started", "")),
        str(run.header.get("command", "")),
        str(run.folder),
    ]


def _settings(methods: list[Method]) -> list[Table]:
    """All in which methods of one name differ, where their labels do not say it all."""
    told = [method for method in methods if method.name.unnamed]
    names = list(dict.fromkeys(name for method in told for name in method.name.settings))
    rows = [[method.label, *(method.name.settings.get(name, "") for name in names)] for method in told]
    return [Table(("method", *names), rows, "All settings in which methods of one name differ.")] if told else []


def _config(method: Method) -> str:
    header = method.runs[0].header
    config, parts = header.get("config"), header.get("parts")
    if config is not None:
        return "\n".join(_toml(config))
    lines = ["# This run used a task or method of its own, which cannot be built from a record. What is known of it:"]
    attributes = [f"{json.dumps(name)} = {_value(value)}" for name, value in (header.get("attributes") or {}).items()]
    return "\n".join([*lines, *_toml(parts or {}), *(["", "[attributes]", *attributes] if attributes else [])])


def _toml(tree: dict[str, Any], path: str = "") -> list[str]:
    """As a file for `fedecho run`."""
    lines = [f"{key} = {_value(value)}" for key, value in tree.items() if value is not None and not isinstance(value, dict)]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", f"[{path}{key}]", *_toml(value, f"{path}{key}.")]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    # JSON escapes an emoji as two halves, which TOML has not, and leaves DEL, which TOML must have escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _notes(methods: list[Method]) -> list[Table]:
    """What tasks want said beside their numbers: the model and its files, the prompt, what stands in for what."""
    seen = Counter(note for method in methods for run in method.runs for note in run.notes.items())
    rows = [[name, text, str(count)] for (name, text), count in sorted(seen.items())]
    return [Table(("of the task", "", "runs"), rows)] if rows else []


def _environment(methods: list[Method]) -> Table:
    """One row for each machine and software that occurs."""
    seen: dict[tuple[str, ...], int] = {}
    for run in (run for method in methods for run in method.runs):
        software, execution = run.header.get("software", {}), run.header.get("execution", {})
        how = ", ".join(f"{key} {value}" for key, value in execution.items())
        more = ", ".join(f"{name} {version}" for name, version in software.items() if name not in SOFTWARE)
        row = (*(str(software.get(name, "")) for name in SOFTWARE), more, how)
        seen[row] = seen.get(row, 0) + 1
    rows = [[*row, str(count)] for row, count in seen.items()]
    return Table((*SOFTWARE, "libraries", "computed by", "runs"), rows)

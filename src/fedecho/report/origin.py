"""Where the runs came from: configuration, environment, command."""

import json
from collections import Counter
from typing import Any

from fedecho.report.load import RunData
from fedecho.report.methods import Method
from fedecho.report.spec import Section, Table

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

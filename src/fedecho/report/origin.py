"""Where the runs came from: configuration, environment, command."""

import json
from collections import Counter
from typing import Any

from fedecho.report.methods import Method
from fedecho.report.spec import Section, Table

SOFTWARE = ("fedecho", "python", "torch", "numpy", "platform")


def origin_section(methods: list[Method]) -> Section:
    rows = [
        [method.label, str(run.seed), str(run.header.get("started", "")), str(run.header.get("command", "")), str(run.folder)]
        for method in methods
        for run in method.runs
    ]
    details = [(f"Configuration of {method.label}, seed {method.runs[0].seed}", _config(method)) for method in methods]
    tables = [Table(("method", "seed", "started", "command", "folder"), rows), _environment(methods), *_notes(methods)]
    return Section("origin", "How it was made", tables=tables, details=details)


def _config(method: Method) -> str:
    config = method.runs[0].header.get("config")
    if config is None:
        return "This run used a task or method of its own, which a record cannot write down."
    return "\n".join(_toml(config))


def _toml(tree: dict[str, Any], path: str = "") -> list[str]:
    """As a file for `fedecho run`."""
    lines = [f"{key} = {_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
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

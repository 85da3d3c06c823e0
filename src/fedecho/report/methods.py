"""Runs that differ in their seed alone belong together: a method, with a name that tells it from the others."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedecho.report.load import RunData
from fedecho.report.spec import Floats, Line, color_of

GRID = 240


@dataclass(frozen=True)
class Method:
    label: str
    color: str
    runs: tuple[RunData, ...]

    def line(self, curves: list[tuple[Floats, Floats]], *, dash: bool = False, name: str | None = None) -> Line | None:
        """The mean over the runs, as far as all of them have come, and the span from the lowest to the highest."""
        found = [(x, y) for x, y in curves if len(x)]
        if not found:
            return None
        name = name or self.label
        if len(found) == 1:
            x, y = thinned(*found[0])
            return Line(name, x, y, self.color, dash=dash)
        grid = _grid([x for x, _ in found])
        table = np.array([np.interp(grid, x, y) for x, y in found])
        return Line(name, grid, table.mean(axis=0), self.color, table.min(axis=0), table.max(axis=0), dash)


def having(methods: list[Method], fits: Callable[[RunData], bool]) -> tuple[list[Method], int]:
    """The methods with those of their runs that have what is needed, and how many runs have not."""
    kept = [replace(method, runs=tuple(run for run in method.runs if fits(run))) for method in methods]
    left = sum(len(method.runs) for method in methods) - sum(len(method.runs) for method in kept)
    return [method for method in kept if method.runs], left


def methods_of(runs: list[RunData]) -> list[Method]:
    grouped: dict[str, list[RunData]] = {}
    for run in runs:
        grouped.setdefault(_identity(run), []).append(run)
    labels = _labels([group[0] for group in grouped.values()])
    return [
        Method(label, color_of("", place), tuple(sorted(group, key=lambda run: run.seed)))
        for place, (label, group) in enumerate(zip(labels, grouped.values(), strict=True))
    ]


def thinned(x: Floats, y: Floats, most: int = 2 * GRID) -> tuple[Floats, Floats]:
    """At most ``most`` points, the last one among them: more cannot be told apart on a screen."""
    if len(x) <= most:
        return x, y
    kept = np.unique(np.linspace(0, len(x) - 1, most).astype(int))
    return x[kept], y[kept]


def _grid(xs: list[Floats]) -> Floats:
    first, last = max(x[0] for x in xs), min(x[-1] for x in xs)
    if all(len(x) == len(xs[0]) and np.array_equal(x, xs[0]) for x in xs):
        return thinned(xs[0], xs[0], GRID)[0]
    return np.linspace(first, max(first, last), min(GRID, max(len(x) for x in xs)))


def _identity(run: RunData) -> str:
    config = run.header.get("config")
    shown = [run.algorithm, run.header.get("name"), _seedless(config)] if config else [run.algorithm, run.header.get("name")]
    return json.dumps(shown, sort_keys=True)


def _seedless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _seedless(value) for key, value in tree.items() if key != "seed"}
    return tree


def _labels(firsts: list[RunData]) -> list[str]:
    """The method's name; where two have the same, with the settings in which they differ."""
    several = len({run.header.get("name") for run in firsts}) > 1
    names = [f"{run.algorithm}, {run.header.get('name')}" if several else run.algorithm for run in firsts]
    labels = []
    for run, name in zip(firsts, names, strict=True):
        others = [other for other, other_name in zip(firsts, names, strict=True) if other is not run and other_name == name]
        differs = _differing(run, others)
        labels.append(f"{name} ({', '.join(differs[:2])})" if differs else name)
    if len(set(labels)) < len(labels):
        labels = [f"{label} [{Path(run.folder).name}]" for label, run in zip(labels, firsts, strict=True)]
    return labels


def _differing(run: RunData, others: list[RunData]) -> list[str]:
    mine = _flat(_seedless(run.header.get("config") or {}))
    theirs = [_flat(_seedless(other.header.get("config") or {})) for other in others]
    keys = [key for key, value in mine.items() if any(other.get(key) != value for other in theirs)]
    return [f"{key.rpartition('.')[2]} {mine[key]}" for key in keys]


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat

"""Runs that differ in their seed alone belong together: a method, with a name that tells it from the others."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedecho.report.groups import Label, grouped, labels_of
from fedecho.report.load import RunData
from fedecho.report.spec import Floats, Line, color_of

GRID = 240


@dataclass(frozen=True)
class Method:
    name: Label
    color: str
    runs: tuple[RunData, ...]
    """One for each seed."""
    repeated: tuple[RunData, ...] = ()
    """Runs of a seed that another run stands for; they count nowhere."""

    @property
    def label(self) -> str:
        return self.name.text

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
    groups = grouped(runs)
    return [
        Method(label, color_of("", place), group.runs, group.repeated)
        for place, (label, group) in enumerate(zip(labels_of(groups), groups, strict=True))
    ]


def repetitions(methods: list[Method]) -> list[str]:
    """What to say of each run that does not count."""
    return [_repetition(method, run) for method in methods for run in method.repeated]


def _repetition(method: Method, run: RunData) -> str:
    kept = next(other for other in method.runs if other.seed == run.seed)
    ends = [each.summary.model_sha256 for each in (run, kept) if each.summary]
    end = "" if len(ends) < 2 else ", with the same model" if ends[0] == ends[1] else ", with another model"
    return f"{run.folder}: a repeat of {kept.folder} ({method.label}, seed {run.seed}){end}; each seed counts once"


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

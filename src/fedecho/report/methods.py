"""Groups runs that differ only in their seed into methods, each with a unique label and a color."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedecho.report.groups import Label, grouped, labels_of
from fedecho.report.load import RunData
from fedecho.report.spec import Curve, Floats, color_of

GRID = 240


@dataclass(frozen=True)
class Method:
    name: Label
    color: str
    runs: tuple[RunData, ...]
    """One run per seed."""
    repeated: tuple[RunData, ...] = ()
    """Further runs of a seed that is already in ``runs``; they are not counted."""

    @property
    def label(self) -> str:
        return self.name.text

    def curve(self, curves: list[tuple[Floats, Floats]], *, dash: bool = False, name: str | None = None) -> Curve | None:
        """The mean over the runs, up to where all of them have data, with a band from the lowest to the highest."""
        curves = [(x, y) for x, y in curves if len(x)]
        if not curves:
            return None
        name = name or self.label
        if len(curves) == 1:
            x, y = thinned(*curves[0])
            return Curve(name, x, y, self.color, dash=dash)
        grid = _grid([x for x, _ in curves])
        table = np.array([np.interp(grid, x, y) for x, y in curves])
        return Curve(name, grid, table.mean(axis=0), self.color, table.min(axis=0), table.max(axis=0), dash)


def having(methods: list[Method], fits: Callable[[RunData], bool]) -> tuple[list[Method], int]:
    """The methods restricted to the runs for which ``fits`` holds, and the number of other runs."""
    kept = [replace(method, runs=tuple(run for run in method.runs if fits(run))) for method in methods]
    left = sum(len(method.runs) for method in methods) - sum(len(method.runs) for method in kept)
    return [method for method in kept if method.runs], left


def methods_of(runs: list[RunData]) -> list[Method]:
    groups = grouped(runs)
    return [
        Method(label, color_of("", index), group.runs, group.repeated)
        for index, (label, group) in enumerate(zip(labels_of(groups), groups, strict=True))
    ]


def repetitions(methods: list[Method]) -> list[str]:
    """One sentence for each repeated run."""
    return [_repetition(method, run) for method in methods for run in method.repeated]


def _repetition(method: Method, run: RunData) -> str:
    kept = next(other for other in method.runs if other.seed == run.seed)
    digests = [each.summary.model_sha256 for each in (run, kept) if each.summary]
    models = "" if len(digests) < 2 else ", same model" if digests[0] == digests[1] else ", different model"
    return f"{run.folder} repeats {kept.folder} ({method.label}, seed {run.seed}{models}); each seed counts once"


def thinned(x: Floats, y: Floats, most: int = 2 * GRID) -> tuple[Floats, Floats]:
    """At most ``most`` points, always including the last: a screen cannot resolve more."""
    if len(x) <= most:
        return x, y
    kept = np.unique(np.linspace(0, len(x) - 1, most).astype(int))
    return x[kept], y[kept]


def _grid(xs: list[Floats]) -> Floats:
    first, last = max(x[0] for x in xs), min(x[-1] for x in xs)
    if all(len(x) == len(xs[0]) and np.array_equal(x, xs[0]) for x in xs):
        return thinned(xs[0], xs[0], GRID)[0]
    return np.linspace(first, max(first, last), min(GRID, max(len(x) for x in xs)))

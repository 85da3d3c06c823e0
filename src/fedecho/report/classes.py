"""Accuracy class by class, and on the classes that only stragglers hold: the paper's claim, made visible."""

import numpy as np

from fedecho.report.load import LAST, RunData
from fedecho.report.methods import Method, having
from fedecho.report.spec import Dots, Figure, Floats, Heat, Line, Section

ONLY, MOSTLY = 0.9, 0.5


def classes_section(methods: list[Method]) -> Section:
    known, without = having(methods, lambda run: run.per_class is not None)
    missing = [f"accuracy by class of {without} runs: their records do not have it (see Task.evaluate)"] if without else []
    if not known:
        return Section("classes", "Classes", missing=missing)
    held, _ = having(known, lambda run: held_by_stragglers(run) is not None)
    figures = [_table(known)]
    if held:
        lines, found = _straggler_lines(held)
        figures += [*lines, _against_share(held)]
        missing += found
    else:
        missing.append("classes of stragglers: these records do not say who holds which class (a task's label_counts)")
    return Section("classes", "Classes, and who alone knows them", _intro(held), figures, missing=missing)


def _intro(held: list[Method]) -> str:
    if not held:
        return ""
    return (
        "A class whose examples lie with slow clients alone is taught by updates that come seldom and stale. "
        "Stragglers are the clients of the slowest runtime class, or the slowest tenth."
    )


def stragglers(run: RunData) -> list[int]:
    """The clients of class long; where there is no such class, the tenth that takes longest by its jobs."""
    long = [client for client, name in enumerate(run.classes) if name == "long"]
    if long or not len(run.dispatches.number):
        return long
    began = dict(zip(run.dispatches.number.tolist(), run.dispatches.time.tolist(), strict=True))
    took: dict[int, list[float]] = {}
    for number, client, time in zip(run.jobs.number.tolist(), run.jobs.client.tolist(), run.jobs.time.tolist(), strict=True):
        if number in began:
            took.setdefault(client, []).append(time - began[number])
    slowest = sorted(took, key=lambda client: -float(np.median(took[client])))
    return slowest[: max(1, run.num_clients // 10)]


def held_by_stragglers(run: RunData) -> Floats | None:
    """The share of every class's training examples that stragglers hold."""
    if run.labels is None or run.per_class is None:
        return None
    slow = stragglers(run)
    if not slow:
        return None
    share: Floats = run.labels[slow].sum(axis=0) / np.maximum(run.labels.sum(axis=0), 1)
    return share


def _table(methods: list[Method]) -> Figure:
    width = max(run.num_labels for method in methods for run in method.runs)
    table = np.full((len(methods), width), np.nan)
    for row, method in enumerate(methods):
        mean = np.mean([_last(run) for run in method.runs], axis=0)
        table[row, : len(mean)] = mean
    heat = Heat(
        [str(name) for name in range(width)], [method.label for method in methods], table, "accuracy", width <= 20, high=1.0
    )
    note = "Mean of the last ten evaluations and over seeds."
    height = 170 + 34 * len(methods)
    return Figure("accuracy-by-class", "Accuracy by class", "class", "", [heat], note, wide=True, percent=True, height=height)


def _last(run: RunData) -> Floats:
    found = run.per_class
    assert found is not None  # noqa: S101 (for the type checker)
    mean: Floats = found[-LAST:].mean(axis=0)
    return mean


def _straggler_lines(methods: list[Method]) -> tuple[list[Figure], list[str]]:
    """Two figures: on the stragglers' own classes, and on all others, over versions."""
    shares = [_share(run) for method in methods for run in method.runs]
    bound = next((bound for bound in (ONLY, MOSTLY) if any((share >= bound).any() for share in shares)), None)
    if bound is None:
        most = max(float(share.max()) for share in shares)
        return [], [f"classes that only stragglers hold: there are none; they hold at most {most:.0%} of any class"]
    own = [line for method in methods if (line := _mean_over(method, bound, True)) is not None]
    rest = [line for method in methods if (line := _mean_over(method, bound, False)) is not None]
    whose = "only stragglers hold" if bound == ONLY else "mostly stragglers hold"
    counted = [int((share >= bound).sum()) for share in shares]
    many = f"{min(counted)} to {max(counted)}" if min(counted) < max(counted) else str(counted[0])
    note = f"Classes of which stragglers hold at least {bound:.0%} of the examples: {many} by seed. Seeds without one are left out."
    figures = [Figure("straggler-classes", f"Accuracy on classes that {whose}", "version", "accuracy", own, note, percent=True)]
    if rest:
        figures.append(Figure("other-classes", "Accuracy on all other classes", "version", "accuracy", rest, percent=True))
    return figures, []


def _share(run: RunData) -> Floats:
    share = held_by_stragglers(run)
    assert share is not None  # noqa: S101 (for the type checker)
    return share


def _mean_over(method: Method, bound: float, own: bool) -> Line | None:
    curves = []
    for run in method.runs:
        chosen, table = (_share(run) >= bound) == own, run.per_class
        if table is not None and chosen[: table.shape[1]].any():
            curves.append((run.column("version"), table[:, chosen[: table.shape[1]]].mean(axis=1)))
    return method.line(curves)


def _against_share(methods: list[Method]) -> Figure:
    marks = []
    for method in methods:
        shares = [_share(run)[: run.num_labels] for run in method.runs]
        scores = [_last(run) for run in method.runs]
        text = [f"class {label}, seed {run.seed}" for run in method.runs for label in range(run.num_labels)]
        marks.append(Dots(method.label, 100 * np.concatenate(shares), np.concatenate(scores), method.color, text))
    note = "A dot is a class of one run."
    return Figure(
        "accuracy-by-straggler-share", "The more stragglers hold of a class …", "share held by stragglers, %", "accuracy",
        marks, note, percent=True,
    )  # fmt: skip

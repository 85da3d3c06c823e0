"""Accuracy over versions, virtual time and real time; by class, and on the classes that only stragglers hold."""

from collections.abc import Callable
from statistics import fmean

import numpy as np

from fedecho.report.load import LAST, RunData
from fedecho.report.methods import Method, having, repetitions
from fedecho.report.spec import Dots, Figure, Floats, Heat, Line, Section, Table
from fedecho.report.terminal import percent
from fedecho.runs.summary import last_scores

Scale = tuple[float, str]


def time_unit(seconds: float) -> Scale:
    """What to divide by, and the name of the unit, so that people can read it."""
    if seconds >= 3 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if seconds >= 180 else (1.0, "seconds")


def accuracy_section(methods: list[Method]) -> Section:
    runs = [run for method in methods for run in method.runs]
    virtual = time_unit(max((run.column("time").max(initial=0.0) for run in runs), default=0.0))
    clock = runs[0].clock if runs else "virtual"
    real = time_unit(max((run.column("real_s").max(initial=0.0) for run in runs), default=0.0))
    figures = [
        _figure("versions", "Accuracy over versions", "version", methods, lambda run: run.column("version")),
        _figure(
            "virtual-time",
            f"Accuracy over {clock} time",
            f"{clock} {virtual[1]}",
            methods,
            lambda run: run.column("time") / virtual[0],
        ),
        _figure("real-time", "Accuracy over real time", f"real {real[1]}", methods, lambda run: run.column("real_s") / real[0]),
    ]
    several = any(len(method.runs) > 1 for method in methods)
    intro = (
        "Lines are means over seeds, as far as all seeds have come; bands span the lowest to the highest seed."
        if several
        else ""
    )
    shown = [figure for figure in figures if figure.marks]
    missing = () if shown else ("accuracy: nothing has been evaluated yet",)
    return Section("accuracy", "Accuracy", intro, shown, missing=missing)


def _figure(slug: str, title: str, x_label: str, methods: list[Method], x_of: Callable[[RunData], Floats]) -> Figure:
    lines = [method.line([(x_of(run), run.column("accuracy")) for run in method.runs]) for method in methods]
    marks = [line for line in lines if line is not None]
    return Figure(f"accuracy-over-{slug}", title, x_label, "accuracy", marks, percent=True)


def glance(methods: list[Method]) -> Section:
    rows = [_row(method) for method in methods]
    head = ("method", "seeds", "last 10, %", "final, %", "best, %", "staleness", "virtual h", "real s", "lost", "rejected", "")
    note = "Mean ± deviation over seeds. Last 10: of a run's last ten evaluations, at most: single ones jump under stragglers."
    if any(method.repeated for method in methods):
        note += " Of several runs with one seed, the one counts that finished or came furthest, then the latest."
    tables = [Table(head, rows, f"{note}{_stand_ins(methods)}"), *_scores(methods)]
    return Section("glance", "At a glance", tables=tables, missing=repetitions(methods))


def _stand_ins(methods: list[Method]) -> str:
    told = sorted({run.notes["stand_in"] for method in methods for run in method.runs if "stand_in" in run.notes})
    return f" Stand-ins: {'; or '.join(told)}." if told else ""


def _scores(methods: list[Method]) -> list[Table]:
    """What the task judges by beside its accuracy, and on what; nothing if there is no more."""
    kept = {method.label: [last_scores(run.evaluations) for run in method.runs if run.evaluations] for method in methods}
    names = sorted({name for scores in kept.values() for each in scores for name in each if name != "accuracy"})
    judged = sorted({run.notes.get("judged on", "") for method in methods for run in method.runs})
    if not names:
        return []
    rows = [
        [label, *(_mean([each[name] for each in scores if name in each]) for name in names)] for label, scores in kept.items()
    ]
    on = f" Judged on {', '.join(filter(None, judged))}." if any(judged) else ""
    return [Table(("method", *names), rows, f"Of the last evaluation, mean over seeds, as the task gives them.{on}")]


def _mean(values: list[float]) -> str:
    return f"{fmean(values):.4g}" if values else ""


def _row(method: Method) -> list[str]:
    runs = [run for run in method.runs if run.evaluations]
    state = _state(method)
    if not runs:
        return [method.label, str(len(method.runs)), *[""] * 8, state]
    accuracy = [run.column("accuracy") for run in runs]
    staleness = [mean for run in runs if (mean := run.mean_staleness) is not None]
    return [
        method.label,
        str(len(method.runs)),
        percent([float(values[-LAST:].mean()) for values in accuracy]),
        percent([float(values[-1]) for values in accuracy]),
        percent([float(values.max()) for values in accuracy]),
        f"{fmean(staleness):.1f}" if staleness else "",
        f"{fmean(float(run.column('time')[-1]) for run in runs) / 3600:.2f}",
        f"{np.nanmean([run.column('real_s')[-1] for run in runs]):.1f}",
        str(sum(run.count("lost") for run in runs)),
        str(sum(run.count("rejected") for run in runs)),
        state,
    ]


def _state(method: Method) -> str:
    going = [run for run in method.runs if run.summary is None]
    if not going:
        return "finished"
    told = [
        f"{run.evaluations[-1]['version'] if run.evaluations else 0}/{run.header.get('num_versions', '?')}" for run in going
    ]
    return f"not finished: {', '.join(told[:3])}{' …' if len(told) > 3 else ''}"


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

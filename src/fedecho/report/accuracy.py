"""Accuracy over versions, virtual time and real time, by class, and on classes that only stragglers hold."""

from collections.abc import Callable
from statistics import fmean

import numpy as np

from fedecho.report.load import LAST, RunData
from fedecho.report.methods import Method, having, repetitions
from fedecho.report.spec import Curve, Dots, Figure, Floats, HeatMap, Section, Table
from fedecho.report.terminal import percent
from fedecho.runs.summary import last_scores

Scale = tuple[float, str]


def time_unit(seconds: float) -> Scale:
    """A readable unit for a duration: the divisor in seconds and the unit's name."""
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
        "Lines show the mean over seeds, up to where every seed has data. Bands span the lowest and highest seed."
        if several
        else ""
    )
    shown = [figure for figure in figures if figure.marks]
    missing = () if shown else ("accuracy (nothing has been evaluated yet)",)
    return Section("accuracy", "Accuracy", intro, shown, missing=missing)


def _figure(slug: str, title: str, x_label: str, methods: list[Method], x_of: Callable[[RunData], Floats]) -> Figure:
    curves = [method.curve([(x_of(run), run.column("accuracy")) for run in method.runs]) for method in methods]
    marks = [curve for curve in curves if curve is not None]
    return Figure(f"accuracy-over-{slug}", title, x_label, "accuracy", marks, percent=True)


def glance(methods: list[Method]) -> Section:
    rows = [_row(method) for method in methods]
    head = ["method", "seeds", "last 10 (%)", "final (%)", "best (%)", "mean staleness", "virtual time (h)", "real time (s)"]
    head += ["lost", "rejected", "status"]
    note = "Accuracies are means ± standard deviation over seeds. “Last 10” is the mean of a run's last ten evaluations: "
    note += "single evaluations fluctuate when stragglers report."
    if any(method.repeated for method in methods):
        note += " If a seed was run more than once, one run counts: one that finished, else the furthest, then the latest."
    tables = [Table(head, rows, f"{note}{_stand_ins(methods)}"), *_scores(methods)]
    return Section("glance", "At a glance", tables=tables, missing=repetitions(methods))


def _stand_ins(methods: list[Method]) -> str:
    stand_ins = sorted({run.notes["stand_in"] for method in methods for run in method.runs if "stand_in" in run.notes})
    return f" Stand-ins: {'; or '.join(stand_ins)}." if stand_ins else ""


def _scores(methods: list[Method]) -> list[Table]:
    """A table of the task's scores other than accuracy; empty if there are none."""
    kept = {method.label: [last_scores(run.evaluations) for run in method.runs if run.evaluations] for method in methods}
    names = sorted({name for scores in kept.values() for each in scores for name in each if name != "accuracy"})
    judged = sorted({run.notes.get("judged on", "") for method in methods for run in method.runs})
    if not names:
        return []
    rows = [
        [label, *(_mean([each[name] for each in scores if name in each]) for name in names)] for label, scores in kept.items()
    ]
    on = f" Evaluated on {', '.join(filter(None, judged))}." if any(judged) else ""
    return [Table(("method", *names), rows, f"Scores of the last evaluation as reported by the task, mean over seeds.{on}")]


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
    unfinished = [run for run in method.runs if run.summary is None]
    if not unfinished:
        return "finished"
    versions = [
        f"{run.evaluations[-1]['version'] if run.evaluations else 0}/{run.header.get('num_versions', '?')}"
        for run in unfinished
    ]
    return f"not finished: {', '.join(versions[:3])}{' …' if len(versions) > 3 else ''}"


ONLY, MOSTLY = 0.9, 0.5
"""Shares of a class's examples above which stragglers hold it alone, or mostly."""


def classes_section(methods: list[Method]) -> Section:
    scored, without = having(methods, lambda run: run.per_class is not None)
    of_runs = "1 run" if without == 1 else f"{without} runs"
    missing = [f"accuracy by class for {of_runs} (not recorded; Task.evaluate can report it)"] if without else []
    if not scored:
        return Section("classes", "Classes", missing=missing)
    held, _ = having(scored, lambda run: held_by_stragglers(run) is not None)
    figures = [_class_table(scored)]
    if held:
        curves, without_curves = _straggler_curves(held)
        figures += [*curves, _against_share(held)]
        missing += without_curves
    else:
        missing.append("classes held by stragglers (not recorded; a task's label_counts says which client holds which class)")
    return Section("classes", "Classes", _intro(held), figures, missing=missing)


def _intro(held: list[Method]) -> str:
    if not held:
        return ""
    return (
        "A class held only by slow clients is learned from rare, stale updates. Stragglers are the clients of the "
        "slowest runtime class or, without runtime classes, the slowest tenth of all clients."
    )


def stragglers(run: RunData) -> list[int]:
    """The clients of class ``long`` or, without that class, the slowest tenth by median job duration."""
    long = [client for client, name in enumerate(run.classes) if name == "long"]
    if long or not len(run.dispatches.number):
        return long
    started = dict(zip(run.dispatches.number.tolist(), run.dispatches.time.tolist(), strict=True))
    durations: dict[int, list[float]] = {}
    for number, client, time in zip(run.jobs.number.tolist(), run.jobs.client.tolist(), run.jobs.time.tolist(), strict=True):
        if number in started:
            durations.setdefault(client, []).append(time - started[number])
    slowest = sorted(durations, key=lambda client: -float(np.median(durations[client])))
    return slowest[: max(1, run.num_clients // 10)]


def held_by_stragglers(run: RunData) -> Floats | None:
    """The share of each class's training examples that stragglers hold."""
    if run.labels is None or run.per_class is None:
        return None
    slow = stragglers(run)
    if not slow:
        return None
    share: Floats = run.labels[slow].sum(axis=0) / np.maximum(run.labels.sum(axis=0), 1)
    return share


def _class_table(methods: list[Method]) -> Figure:
    width = max(run.num_labels for method in methods for run in method.runs)
    table = np.full((len(methods), width), np.nan)
    for row, method in enumerate(methods):
        mean = np.mean([_last(run) for run in method.runs], axis=0)
        table[row, : len(mean)] = mean
    heat = HeatMap(
        [str(name) for name in range(width)], [method.label for method in methods], table, "accuracy", width <= 20, z_max=1.0
    )
    note = "Mean over the last ten evaluations and all seeds."
    height = 170 + 34 * len(methods)
    return Figure("accuracy-by-class", "Accuracy by class", "class", "", [heat], note, wide=True, percent=True, height=height)


def _last(run: RunData) -> Floats:
    scores = run.per_class
    assert scores is not None  # noqa: S101 (for the type checker)
    mean: Floats = scores[-LAST:].mean(axis=0)
    return mean


def _straggler_curves(methods: list[Method]) -> tuple[list[Figure], list[str]]:
    """Accuracy over time on the stragglers' classes and on all others, or why there are no such figures."""
    runs = [run for method in methods for run in method.runs]
    divisor, unit = time_unit(max(run.column("time").max(initial=0.0) for run in runs))
    axes = (f"{runs[0].clock} {unit}", "accuracy")
    shares = [_share(run) for run in runs]
    bound = next((bound for bound in (ONLY, MOSTLY) if any((share >= bound).any() for share in shares)), None)
    if bound is None:
        most = max(float(share.max()) for share in shares)
        return [], [f"classes that only stragglers hold (there are none: stragglers hold at most {most:.0%} of any class)"]
    own = [curve for method in methods if (curve := _mean_over(method, bound, True, divisor)) is not None]
    rest = [curve for method in methods if (curve := _mean_over(method, bound, False, divisor)) is not None]
    whose = "only stragglers hold" if bound == ONLY else "mostly stragglers hold"
    counted = [int((share >= bound).sum()) for share in shares]
    many = f"{min(counted)} to {max(counted)}" if min(counted) < max(counted) else str(counted[0])
    note = f"Stragglers hold at least {bound:.0%} of the examples of each of these classes ({many} per seed). "
    note += "Seeds without such a class are left out."
    figures = [Figure("straggler-classes", f"Accuracy on classes that {whose}", *axes, own, note, percent=True)]
    if rest:
        figures.append(Figure("other-classes", "Accuracy on all other classes", *axes, rest, percent=True))
    return figures, []


def _share(run: RunData) -> Floats:
    share = held_by_stragglers(run)
    assert share is not None  # noqa: S101 (for the type checker)
    return share


def _mean_over(method: Method, bound: float, own: bool, divisor: float) -> Curve | None:
    curves = []
    for run in method.runs:
        chosen, table = (_share(run) >= bound) == own, run.per_class
        if table is not None and chosen[: table.shape[1]].any():
            curves.append((run.column("time") / divisor, table[:, chosen[: table.shape[1]]].mean(axis=1)))
    return method.curve(curves)


def _against_share(methods: list[Method]) -> Figure:
    marks = []
    for method in methods:
        shares = [_share(run)[: run.num_labels] for run in method.runs]
        scores = [_last(run) for run in method.runs]
        text = [f"class {label}, seed {run.seed}" for run in method.runs for label in range(run.num_labels)]
        marks.append(Dots(method.label, 100 * np.concatenate(shares), np.concatenate(scores), method.color, text))
    note = "Each dot is one class in one run."
    return Figure(
        "accuracy-by-straggler-share", "Accuracy by share held by stragglers", "share held by stragglers (%)", "accuracy",
        marks, note, percent=True,
    )  # fmt: skip

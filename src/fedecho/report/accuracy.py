"""How well and how soon: accuracy over versions, over virtual time and over real time, and the table of all methods."""

from collections.abc import Callable
from statistics import fmean

import numpy as np

from fedecho.experiments.summary import last_scores
from fedecho.report.load import LAST, RunData
from fedecho.report.methods import Method, repetitions
from fedecho.report.spec import Figure, Floats, Section, Table
from fedecho.report.tables import percent

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

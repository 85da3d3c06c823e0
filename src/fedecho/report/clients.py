"""The section on clients: timelines of jobs, staleness by runtime class, participation, losses and privacy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from fedecho.report.accuracy import time_unit
from fedecho.report.load import STATUSES, RunData
from fedecho.report.methods import Method
from fedecho.report.spec import Bars, Curve, Dots, Figure, Floats, HeatMap, Ints, Mark, Section, Spans, Table, color_of
from fedecho.runs.record_schema import Spent

MOST_CLIENTS, MOST_JOBS = 60, 4000
ROWS, COLUMNS = 48, 120
ORDER = ("long", "medium", "short")


@dataclass(frozen=True)
class Work:
    """All jobs with their start and end. A job in progress ends at the time of the last record line."""

    client: Ints
    start: Floats
    end: Floats
    base: Ints
    staleness: Ints
    status: Sequence[str]


def timeline(run: RunData, slug: str, whose: str) -> Figure | None:
    """The timeline of a run's jobs, or None if no dispatch is recorded."""
    work = work_of(run)
    if work is None:
        return None
    few = run.num_clients <= MOST_CLIENTS and len(work.client) <= MOST_JOBS
    return _by_job(run, work, slug, whose) if few else _by_row(run, work, slug, whose)


def work_of(run: RunData) -> Work | None:
    sent, jobs = run.dispatches, run.jobs
    if not len(sent.number):
        return None
    arrival = {int(number): index for index, number in enumerate(jobs.number)}
    indices = np.array([arrival.get(int(number), -1) for number in sent.number])
    answered = indices >= 0
    now = max(float(jobs.time.max(initial=0.0)), float(sent.time.max(initial=0.0)))
    end, staleness = np.full(len(indices), now), np.zeros(len(indices), dtype=np.int64)
    end[answered], staleness[answered] = jobs.time[indices[answered]], jobs.staleness[indices[answered]]
    status = [STATUSES[jobs.status[index]] if index >= 0 else "in progress" for index in indices]
    return Work(sent.client, sent.time, end, sent.base, staleness, status)


def order_of(run: RunData) -> Ints:
    """Clients in row order: slowest runtime class first, then by number. An array, since there may be a million clients."""
    if not run.classes:
        return np.arange(run.num_clients)
    names = np.array(run.classes)
    rank_of = {name: number for number, name in enumerate(ORDER)}
    rank = np.array([rank_of.get(name, 9) for name in run.classes])
    return np.lexsort((np.arange(len(names)), names, rank))


def _by_job(run: RunData, work: Work, slug: str, whose: str) -> Figure:
    order = order_of(run).tolist()
    row_of = np.empty(run.num_clients, dtype=np.int64)
    row_of[order] = np.arange(len(order))
    classes = run.classes or [""] * run.num_clients
    unit = time_unit(float(work.end.max(initial=0.0)))
    rows = [f"{classes[client]} {client}".strip() for client in order]
    spans = Spans(rows, row_of[work.client], work.start / unit[0], work.end / unit[0], work.base, work.staleness, work.status)
    note = "Each bar is a job, from dispatch to arrival. The color is its staleness on arrival, in versions."
    note += run.sampling_note
    height = 150 + 16 * len(rows)
    return Figure(
        slug, f"Who trained when: {whose}", f"{run.clock} {unit[1]}", "client", [spans], note, wide=True, height=height
    )


def _by_row(run: RunData, work: Work, slug: str, whose: str) -> Figure:
    """A heat map of groups of clients by time; the color is the share of its clients that were training."""
    groups = _groups(run)
    end = float(work.end.max(initial=1.0)) or 1.0
    unit = time_unit(end)
    edges = np.linspace(0.0, end, COLUMNS + 1)
    row_of = np.zeros(run.num_clients, dtype=np.int64)
    for number, (_, clients) in enumerate(groups):
        row_of[clients] = number
    shape, row = (len(groups), COLUMNS), row_of[work.client]
    busy = np.zeros(shape)
    for number, (_, clients) in enumerate(groups):
        mine = row == number
        worked = np.clip(edges[:, None] - work.start[mine], 0.0, work.end[mine] - work.start[mine]).sum(axis=1)
        busy[number] = run.record_every * np.diff(worked) / (np.diff(edges) * len(clients))  # scaled up from the sample
    column = np.clip((work.end / end * COLUMNS).astype(int), 0, COLUMNS - 1)
    hover = {name: _counted(row, column, np.array([s == name for s in work.status]), shape) for name in STATUSES}
    accepted = np.array([status == "accepted" for status in work.status])
    summed = np.zeros(shape)
    np.add.at(summed, (row[accepted], column[accepted]), work.staleness[accepted])
    hover["mean staleness"] = np.round(summed / np.maximum(hover["accepted"], 1), 1)
    middles = (edges[:-1] + edges[1:]) / 2 / unit[0]
    heat = HeatMap(middles, [label for label, _ in groups], busy, "share of clients training", hover=hover)
    note = (
        f"{run.num_clients:,} clients, {len(work.client):,} jobs. Each row is a group of clients of one class; "
        f"hover over a cell for its counts of arrivals.{run.sampling_note}"
    )
    return Figure(
        slug,
        f"Who trained when: {whose}",
        f"{run.clock} {unit[1]}",
        "clients",
        [heat],
        note,
        wide=True,
        height=180 + 12 * len(groups),
    )


def _counted(row: Ints, column: Ints, chosen: "np.ndarray[tuple[int], np.dtype[np.bool_]]", shape: tuple[int, int]) -> Floats:
    table = np.zeros(shape)
    np.add.at(table, (row[chosen], column[chosen]), 1)
    return table


def _groups(run: RunData) -> list[tuple[str, Ints]]:
    """About ``ROWS`` groups of clients: each within one runtime class, each class with at least one group."""
    order = order_of(run)
    names = np.array(run.classes)[order] if run.classes else np.full(len(order), "")
    edges = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), len(order)]
    groups = []
    for start, end in pairwise(edges):
        rows = max(1, min(end - start, round(ROWS * (end - start) / run.num_clients)))
        for part in np.array_split(order[start:end], rows):
            label = f"{names[start]} {part[0]}" if len(part) == 1 else f"{names[start]} {part[0]} … {part[-1]}"
            groups.append((label.strip(), part))
    return groups


MOST_DOTS = 500
MOST_TIMELINES, MOST_NAMES = 4, 3


def clients_section(methods: list[Method]) -> Section:
    shown, missing = _timelines(methods)
    figures = [*shown, *(figure for figure in (_staleness(methods), _participation(methods)) if figure is not None)]
    runs = [run for method in methods for run in method.runs]
    if any("num_clients" in run.clients for run in runs):
        missing.append("participation by client (too many clients to record them one by one)")
    elif not any(run.classes for run in runs):
        missing.append("staleness by runtime class and participation (the records have no client classes or data sizes)")
    intro = "Methods with identical schedules share one timeline: for a given seed, asynchronous methods see the same clients "
    intro += "at the same times."
    samples = sorted({run.record_every for run in runs if run.record_every > 1})
    if samples:
        rates = ", ".join(f"{every:,}" for every in samples)
        intro += f" Some records are samples of one job in {rates}: figures of jobs show the sample, counts include all jobs."
    return Section("clients", "Clients", intro, figures, [*_faults(methods), *_privacy(methods)], missing=missing)


def _timelines(methods: list[Method]) -> tuple[list[Figure], list[str]]:
    """A timeline of each distinct schedule among the methods' first seeds, and notes on what is left out."""
    drawn: dict[bytes, tuple[RunData, list[str]]] = {}
    for method in methods:
        run = next((run for run in method.runs if len(run.dispatches.number)), method.runs[0])
        drawn.setdefault(run.schedule, (run, []))[1].append(method.label)
    figures, missing = [], []
    for index, (run, labels) in enumerate(drawn.values()):
        if index == MOST_TIMELINES:
            missing.append(f"{len(drawn) - index} more timelines (pass fewer runs to `fedecho report` to see them)")
            break
        more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
        whose = f"{', '.join(labels[:MOST_NAMES])}{more}, seed {run.seed}"
        figure = timeline(run, f"timeline-{index + 1}", whose)
        if figure is None:
            missing.append(f"the timeline of {run.folder.name} (no dispatches are recorded)")
        else:
            figures.append(figure)
    return figures, missing


def _ordered(names: set[str]) -> list[str]:
    return sorted(names, key=lambda name: (ORDER[::-1].index(name) if name in ORDER else 9, name))


def _staleness(methods: list[Method]) -> Figure | None:
    """A histogram of the staleness of accepted updates over all runs, by runtime class."""
    by_class: dict[str, list[int]] = {}
    for run in (run for method in methods for run in method.runs if run.clients):
        staleness, kind = run.jobs.staleness[run.jobs.accepted], run.jobs.kind[run.jobs.accepted]
        for index, name in enumerate(run.jobs.kinds):
            if (kind == index).any():
                by_class.setdefault(name, []).extend(staleness[kind == index].tolist())
    if not by_class:
        return None
    edges = _bins(max(max(values) for values in by_class.values()))
    labels = [str(a) if b == a + 1 else f"{a} to {b - 1}" for a, b in pairwise(edges)]
    marks = []
    for index, name in enumerate(_ordered(set(by_class))):
        counts = np.histogram(by_class[name], edges)[0]
        label = f"{name}, mean {np.mean(by_class[name]):.1f}"
        marks.append(Bars(label, labels, counts / counts.sum(), color_of(name, index)))
    note = "Staleness of accepted updates on arrival; shares add up to 100 % within each class."
    note += next((run.sampling_note for method in methods for run in method.runs if run.sampling_note), "")
    return Figure(
        "staleness-by-class", "Staleness by runtime class", "staleness (versions)", "share", marks, note, percent=True
    )


def _bins(most: int) -> list[int]:
    """Edges of about fifteen bins at most: single values first, then wider and wider ones."""
    edges, width = list(range(min(most, 5) + 2)), 2
    while edges[-1] <= most:
        edges.append(edges[-1] + width)
        width = width * 2 if len(edges) % 2 else width
    return edges


def _participation(methods: list[Method]) -> Figure | None:
    run = methods[0].runs[0]
    jobs, examples = run.jobs, run.examples
    if not len(examples) or not jobs.accepted.any():
        return None
    reported = np.bincount(jobs.client[jobs.accepted], minlength=len(examples))
    data_share, update_share = examples / max(examples.sum(), 1), reported / reported.sum()
    classes = np.array(run.classes or [""] * len(examples))
    kept = np.unique(np.linspace(0, len(examples) - 1, MOST_DOTS).astype(int))
    largest = float(max(data_share.max(), update_share.max()))
    marks: list[Mark] = [
        Curve("proportional", np.array([0, 100 * largest]), np.array([0, largest]), "#888888", dash=True, is_reference=True)
    ]
    for index, name in enumerate(_ordered(set(classes.tolist()))):
        mine = kept[classes[kept] == name]
        text = [f"client {client}: {reported[client]} updates, {examples[client]} examples" for client in mine]
        marks.append(Dots(name or "clients", 100 * data_share[mine], update_share[mine], color_of(name, index), text))
    note = "Each dot is a client. Clients below the dashed line contribute less than their share of the data."
    if len(kept) < len(examples):
        note += f" {len(kept)} of {len(examples):,} clients are shown."
    title = f"Participation ({methods[0].label}, seed {run.seed})"
    return Figure("participation", title, "share of the data (%)", "share of the updates", marks, note, percent=True)


def _faults(methods: list[Method]) -> list[Table]:
    rows = []
    for method in methods:
        reasons: Counter[str] = Counter()
        for run in method.runs:
            reasons.update(run.reasons)
        rows += [[method.label, reason, str(count)] for reason, count in reasons.most_common(10)]
    return [Table(("method", "lost or rejected because", "count"), rows)] if rows else []


def _privacy(methods: list[Method]) -> list[Table]:
    """The privacy budget that each private run has spent."""
    rows = []
    for method in methods:
        for run in method.runs:
            spent = run.summary.privacy if run.summary else None
            if spent:
                budget = (f"{spent['largest_epsilon']:.2f}", f"{_median_epsilon(spent):.2f}", f"{spent['delta']:g}")
                rows.append([method.label, str(run.seed), *budget])
    head = ("method", "seed", "largest epsilon of a client", "median epsilon", "delta")
    return [Table(head, rows, "Differential privacy spent by each client over all its reports.")] if rows else []


def _median_epsilon(spent: Spent) -> float:
    if "epsilon" in spent:
        return float(median(spent["epsilon"].values()))
    rows = spent["epsilon_by_reports"]
    half, seen = sum(row["clients"] for row in rows) / 2, 0
    for row in rows:
        seen += row["clients"]
        if seen >= half:
            return float(row["epsilon"])
    return 0.0

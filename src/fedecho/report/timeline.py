"""Who trained when, on which version, how stale, and what became of it: job by job, or many clients to a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedecho.report.accuracy import time_unit
from fedecho.report.load import STATUSES, RunData
from fedecho.report.spec import Figure, Floats, Heat, Ints, Spans

MOST_CLIENTS, MOST_JOBS = 60, 4000
ROWS, COLUMNS = 48, 120
ORDER = ("long", "medium", "short")


@dataclass(frozen=True)
class Work:
    """Every job with its start; one that is not answered yet lasts until now."""

    client: Ints
    start: Floats
    end: Floats
    base: Ints
    staleness: Ints
    status: Sequence[str]


def timeline(run: RunData, slug: str, whose: str) -> Figure | None:
    """None of a record that does not say when jobs began."""
    work = work_of(run)
    if work is None:
        return None
    few = run.num_clients <= MOST_CLIENTS and len(work.client) <= MOST_JOBS
    return _by_job(run, work, slug, whose) if few else _by_row(run, work, slug, whose)


def work_of(run: RunData) -> Work | None:
    sent, jobs = run.dispatches, run.jobs
    if not len(sent.number):
        return None
    answer = {int(number): place for place, number in enumerate(jobs.number)}
    places = np.array([answer.get(int(number), -1) for number in sent.number])
    answered = places >= 0
    now = max(float(jobs.time.max(initial=0.0)), float(sent.time.max(initial=0.0)))
    end, staleness = np.full(len(places), now), np.zeros(len(places), dtype=np.int64)
    end[answered], staleness[answered] = jobs.time[places[answered]], jobs.staleness[places[answered]]
    status = [STATUSES[jobs.status[place]] if place >= 0 else "at work" for place in places]
    return Work(sent.client, sent.time, end, sent.base, staleness, status)


def order_of(run: RunData) -> Ints:
    """The slowest class first, then by number; the order of the rows. Arrays, as there may be a million clients."""
    if not run.classes:
        return np.arange(run.num_clients)
    names = np.array(run.classes)
    place = {name: number for number, name in enumerate(ORDER)}
    rank = np.array([place.get(name, 9) for name in run.classes])
    return np.lexsort((np.arange(len(names)), names, rank))


def _by_job(run: RunData, work: Work, slug: str, whose: str) -> Figure:
    order = order_of(run).tolist()
    row_of = np.empty(run.num_clients, dtype=np.int64)
    row_of[order] = np.arange(len(order))
    classes = run.classes or [""] * run.num_clients
    unit = time_unit(float(work.end.max(initial=0.0)))
    rows = [f"{classes[client]} {client}".strip() for client in order]
    spans = Spans(rows, row_of[work.client], work.start / unit[0], work.end / unit[0], work.base, work.staleness, work.status)
    note = "A bar is a job, from the dispatch to the answer; its color says how many versions it was behind when it came."
    note += run.sampled
    height = 150 + 16 * len(rows)
    return Figure(
        slug, f"Who trained when: {whose}", f"{run.clock} {unit[1]}", "client", [spans], note, wide=True, height=height
    )


def _by_row(run: RunData, work: Work, slug: str, whose: str) -> Figure:
    """Clients of one class share rows; a cell's color is the part of its time that its clients were at work."""
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
        busy[number] = run.every * np.diff(worked) / (np.diff(edges) * len(clients))  # a job stands for so many
    column = np.clip((work.end / end * COLUMNS).astype(int), 0, COLUMNS - 1)
    told = {name: _counted(row, column, np.array([s == name for s in work.status]), shape) for name in STATUSES}
    came = np.array([status == "accepted" for status in work.status])
    summed = np.zeros(shape)
    np.add.at(summed, (row[came], column[came]), work.staleness[came])
    told["mean staleness"] = np.round(summed / np.maximum(told["accepted"], 1), 1)
    middles = (edges[:-1] + edges[1:]) / 2 / unit[0]
    heat = Heat(middles, [label for label, _ in groups], busy, "share of clients at work", told=told)
    note = (
        f"{run.num_clients:,} clients, {len(work.client):,} jobs: a row is many of one class; point at a cell for its arrivals."
        f"{run.sampled}"
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
    """At most some ROWS groups of clients of one class each, every class with at least one row."""
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

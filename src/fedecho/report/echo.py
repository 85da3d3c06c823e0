"""FedEcho's inside: how sure the teachers are, how softly the student copies them, how old they are."""

import numpy as np

from fedecho.report.load import RunData
from fedecho.report.methods import Method
from fedecho.report.spec import Figure, Heat, Section
from fedecho.report.timeline import MOST_CLIENTS, order_of

METRICS = (
    ("teacher_entropy", "Teacher entropy", "H, 0 certain to 1 uniform", "The mean entropy of the mean teacher on U."),
    ("soft_weight", "Soft weight", "alpha", "How much of the loss copies the teacher softly; the rest takes its labels."),
    ("distillation_loss", "Distillation loss", "mean over a version's steps", ""),
    ("clipped_share", "Clipping", "share of steps clipped", "How many of the distillation's gradients were longer than nu."),
    ("distill_grad_norm", "Gradient of the distillation", "norm before clipping", ""),
    ("teacher_age", "Mean age of the teachers", "versions", "How long ago clients were heard last, on average."),
)
COLUMNS = 160


def echo_section(methods: list[Method]) -> Section | None:
    """None where no run distilled."""
    teaching = [method for method in methods if any("num_teachers" in line for run in method.runs for line in run.versions[:1])]
    if not teaching:
        return None
    figures = []
    for name, title, y_label, note in METRICS:
        lines = [line for method in teaching if (line := method.line([run.metric(name) for run in method.runs])) is not None]
        if lines:
            figures.append(Figure(f"echo-{name.replace('_', '-')}", title, "version", y_label, lines, note, height=270))
    run = teaching[0].runs[0]
    if run.every > 1:
        missing = [f"how old each teacher is: the record is a sample, one job in {run.every:,}"]
        return Section("echo", "Inside FedEcho", figures=figures, missing=missing)
    ages = _ages(teaching[0], run)
    return Section("echo", "Inside FedEcho", figures=[*figures, ages] if ages else figures)


def _ages(method: Method, run: RunData) -> Figure | None:
    """By client and version: how many versions ago it was heard last, white before it was heard at all."""
    if not run.versions or not run.jobs.accepted.any():
        return None
    last_version = int(run.versions[-1]["version"])
    shown = np.unique(np.linspace(1, last_version, min(COLUMNS, last_version)).astype(int))
    accepted = run.jobs.accepted
    client, heard = run.jobs.client[accepted], (run.jobs.base + run.jobs.staleness)[accepted]
    rows = _chosen(run)
    table = np.full((len(rows), len(shown)), np.nan)
    for row, who in enumerate(rows):
        mine = np.sort(heard[client == who])
        place = np.searchsorted(mine, shown, side="left") - 1  # heard at version v speaks from v + 1 on
        known = place >= 0
        table[row, known] = shown[known] - 1 - mine[place[known]]
    labels = [f"{run.classes[who] if run.classes else ''} {who}".strip() for who in rows]
    note = "A bright row is a teacher that speaks with an old voice; empty until a client is heard for the first time."
    if len(rows) < run.num_clients:
        note += f" {len(rows)} of {run.num_clients:,} clients are drawn."
    heat = Heat(shown.astype(np.float64), labels, table, "age, versions")
    title = f"How old each teacher is ({method.label}, seed {run.seed})"
    return Figure("teacher-ages", title, "version", "client", [heat], note, wide=True, height=160 + 13 * len(rows))


def _chosen(run: RunData) -> list[int]:
    """All clients, slowest class first; of very many, as many of each class as its share."""
    order = order_of(run)
    kept = np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_CLIENTS)).astype(int))
    return [int(client) for client in order[kept]]

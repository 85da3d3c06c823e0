"""The section on distillation: what the teacher says, how far it moves the model, and who stands behind it."""

from collections.abc import Sequence

import numpy as np

from fedecho.report.clients import MOST_CLIENTS, order_of
from fedecho.report.load import RunData
from fedecho.report.methods import Method
from fedecho.report.spec import Curve, Figure, HeatMap, Ints, Section

Line = tuple[str, str, bool]
"""The name of a metric, what is added to the method's label, and whether the line is dashed."""


def _one(name: str) -> tuple[Line, ...]:
    return ((name, "", False),)


METRICS: tuple[tuple[str, tuple[Line, ...], str, str, str], ...] = (
    (
        "distill-shift",
        _one("distill_shift"),
        "How far distillation moves the model",
        "share of the buffer's step",
        "Length of distillation's step divided by the length of the buffer's own step. Near 0, distillation does next to nothing. "
        "In the first versions, above 0.35 it may override the clients; later their updates shrink and the ratio grows.",
    ),
    (
        "teacher-kl",
        (("teacher_kl_before", " before", True), ("teacher_kl_after", " after", False)),
        "Distance to the teacher",
        "KL(teacher || student)",
        "On a sample of the unlabeled data, before and after each version's distillation. It may rise while alpha is low, as hard "
        "labels make the student surer than its teacher.",
    ),
    (
        "teacher-agreement",
        (("teacher_agreement", "", False), ("lowest_agreement", ", lowest client", True)),
        "Agreement with the teacher",
        "share of the unlabeled data",
        "How often a client's best class is the teacher's, as the mean over clients and for the client that agrees least.",
    ),
    (
        "teacher-entropy",
        _one("teacher_entropy"),
        "Teacher entropy",
        "H (0 certain, 1 uniform)",
        "Mean normalized entropy of the averaged teacher on the unlabeled data.",
    ),
    (
        "soft-weight",
        _one("soft_weight"),
        "Soft weight",
        "alpha",
        "Weight of the teacher's soft labels in the loss; the rest uses its hard labels.",
    ),
    ("distillation-loss", _one("distillation_loss"), "Distillation loss", "mean over a version's steps", ""),
    (
        "clipped-share",
        _one("clipped_share"),
        "Clipping",
        "share of steps clipped",
        "Share of distillation steps whose gradient norm exceeds nu.",
    ),
    ("distill-grad-norm", _one("distill_grad_norm"), "Distillation gradient", "norm before clipping", ""),
    (
        "teacher-age",
        _one("teacher_age"),
        "Mean teacher age",
        "versions",
        "Average number of versions since each client's last update.",
    ),
)
COLUMNS = 160
MOST_CLASSES = 100


def echo_section(methods: list[Method]) -> Section | None:
    """The section on distillation, or None if no run distilled."""
    distilling = [
        method for method in methods if any("num_teachers" in line for run in method.runs for line in run.versions[:1])
    ]
    if not distilling:
        return None
    figures = []
    for slug, lines, title, y_label, note in METRICS:
        if curves := _curves(distilling, lines):
            figures.append(Figure(f"echo-{slug}", title, "version", y_label, curves, note, height=270))
    method, missing = distilling[0], list[str]()
    run = method.runs[0]
    figures += _coverage(method, run)
    if run.record_every > 1:
        missing.append(f"teacher age by client (the record is a sample of one job in {run.record_every:,})")
    elif ages := _ages(method, run):
        figures.append(ages)
    if any("distill_shift" in line and "teacher_agreement" not in line for line in run.versions[:1]):
        missing.append(
            "agreement and coverage by class (a language model's bank holds hidden states or a few logits of each token)"
        )
    return Section("echo", "Inside FedEcho", _advice(distilling), figures, missing=missing)


def _curves(methods: list[Method], lines: Sequence[Line]) -> list[Curve]:
    curves = []
    for method in methods:
        for name, addition, dash in lines:
            data = [run.metric(name) for run in method.runs]
            curve = method.curve(data, dash=dash, name=method.label + addition)
            curves += [] if curve is None else [curve]
    return curves


def _advice(methods: list[Method]) -> str:
    """What the runs advised while they ran, each text once."""
    texts = [f"{method.label}, seed {run.seed}: {text}." for method in methods for run in method.runs for text in run.advice]
    return " ".join(texts)


def _shown_versions(last_version: int) -> Ints:
    return np.unique(np.linspace(1, last_version, min(COLUMNS, last_version)).astype(int))


def _coverage(method: Method, run: RunData) -> list[Figure]:
    """A heat map of the number of clients with evidence for each class, by version; the least covered of very many classes."""
    versions, counts = run.coverage
    if not counts.size:
        return []
    shown = _shown_versions(len(versions)) - 1
    table = counts[shown].T
    kept = np.sort(np.argsort(table[:, -1], kind="stable")[:MOST_CLASSES])
    note = (
        "Number of clients whose mean prediction on the unlabeled data gives the class at least half its uniform share. A dark row "
        "is a class that few teachers know, or that the unlabeled data does not show."
    )
    if len(kept) < len(table):
        note += f" The {len(kept)} least covered of {len(table):,} classes are shown."
    heat = HeatMap(versions[shown], [f"class {label}" for label in kept], table[kept], "clients")
    title = f"Teachers by class ({method.label}, seed {run.seed})"
    return [Figure("teacher-coverage", title, "version", "", [heat], note, wide=True, height=160 + 13 * len(kept))]


def _ages(method: Method, run: RunData) -> Figure | None:
    """A heat map of teacher age by client and version, empty before a client's first update."""
    if not run.versions or not run.jobs.accepted.any():
        return None
    last_version = int(run.versions[-1]["version"])
    shown = _shown_versions(last_version)
    accepted = run.jobs.accepted
    client, version = run.jobs.client[accepted], (run.jobs.base + run.jobs.staleness)[accepted]
    rows = _chosen(run)
    table = np.full((len(rows), len(shown)), np.nan)
    for row, who in enumerate(rows):
        mine = np.sort(version[client == who])
        latest = np.searchsorted(mine, shown, side="left") - 1  # an update accepted at version v counts from v + 1
        has_teacher = latest >= 0
        table[row, has_teacher] = shown[has_teacher] - 1 - mine[latest[has_teacher]]
    labels = [f"{run.classes[who] if run.classes else ''} {who}".strip() for who in rows]
    note = "Bright cells are stale teachers. A row is empty until the client's first update is accepted."
    if len(rows) < run.num_clients:
        note += f" {len(rows)} of {run.num_clients:,} clients are shown."
    heat = HeatMap(shown.astype(np.float64), labels, table, "age (versions)")
    title = f"Teacher age by client ({method.label}, seed {run.seed})"
    return Figure("teacher-ages", title, "version", "client", [heat], note, wide=True, height=160 + 13 * len(rows))


def _chosen(run: RunData) -> list[int]:
    """The clients to show, slowest class first: all, or an even sample of very many."""
    order = order_of(run)
    kept = np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_CLIENTS)).astype(int))
    return [int(client) for client in order[kept]]

"""A run written by hand: three clients, three versions, one loss and one rejection, so that every number can be counted."""

import json
from pathlib import Path
from typing import Any

CLIENTS = {"examples": [10, 30, 60], "classes": ["short", "short", "long"], "labels": [{"0": 10}, {"0": 30}, {"1": 60}]}
JOBS = [
    # client, dispatch, base, sent, came, status, staleness
    (0, 0, 0, 0.0, 10.0, "accepted", 0),
    (1, 1, 0, 0.0, 20.0, "accepted", 1),
    (0, 3, 1, 10.0, 30.0, "lost", 1),
    (0, 4, 2, 30.0, 40.0, "rejected", 0),
    (2, 2, 0, 0.0, 100.0, "accepted", 2),
]
SUMMARY = {
    "name": "by-hand",
    "num_versions": 3,
    "final_accuracy": 0.6,
    "last10_accuracy": 0.4,
    "best_accuracy": 0.6,
    "virtual_s": 100.0,
    "real_s": 6.0,
    "accepted": 3,
    "rejected": 1,
    "lost": 1,
    "reasons": {"because": 2},
    "mean_staleness": 1.0,
    "max_staleness": 2,
    "peak_versions_alive": 3,
    "bank_bytes": 800,
    "model_sha256": "0",
    "arrivals_sha256": "0",
}
PER_CLASS = [[0.5, 0.0], [0.8, 0.0], [0.9, 0.6]]


def lines(seed: int = 0, *, old: bool = False, algorithm: str = "fedecho", lift: float = 0.0) -> list[dict[str, Any]]:
    clients = {key: value for key, value in CLIENTS.items() if key != "labels" or not old}
    header = {"event": "header", "format": 1, "name": "by-hand", "seed": seed, "num_versions": 3, "num_params": 1000}
    header |= {"config": {"name": "by-hand", "seed": seed, "algorithm": {"name": algorithm}}, "clients": clients}
    header |= {"execution": {"executor": "serial"}, "software": {"torch": "2"}, "command": "fedecho run by hand", "started": ""}
    told: list[dict[str, Any]] = [header]
    if not old:
        told += [
            {"event": "dispatch", "time": sent, "client": client, "dispatch": number, "base": base}
            for client, number, base, sent, *_ in JOBS
        ]
    version = 0
    for client, number, base, _, came, status, staleness in JOBS:
        line = {"event": "arrival", "time": came, "client": client, "status": status, "dispatch": number, "base": base}
        line |= {"staleness": staleness, "class": CLIENTS["classes"][client]}
        told.append(line | ({"code": "because", "reason": "because"} if status != "accepted" else {}))
        if status == "accepted":
            version += 1
            metrics = {"num_teachers": version, "teacher_entropy": 1 / version, "soft_weight": 0.5}
            told.append({"event": "version", "version": version, "time": came} | metrics)
            scores = {"accuracy": 0.2 * version + lift, "real_s": 2.0 * version}
            if not old:
                scores |= {"per_class": PER_CLASS[version - 1], "clients_s": 1.0 * version, "server_s": 0.5 * version}
                scores |= {"versions_alive": 2, "peak_bytes": 5_000_000}
            told.append({"event": "evaluation", "version": version, "time": came} | scores)
    return told


def write(folder: Path, told: list[dict[str, Any]], *, finished: bool = False) -> Path:
    """The record is replaced at once: a server that watches the folder never reads half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "run.jsonl.part"
    part.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in told))
    part.replace(folder / "run.jsonl")
    if finished:
        summary = SUMMARY | {"algorithm": told[0]["config"]["algorithm"]["name"], "seed": told[0]["seed"]}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder

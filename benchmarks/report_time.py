"""Time `fedecho report` on generated runs written by the real record writer.

    python -m benchmarks.report_time            500 versions, 50 clients, 5 methods, 3 seeds; then one run of 10,000 clients
    python -m benchmarks.report_time --keep DIR keeps the runs and the pages

The command is timed as a user has it: a process of its own, from its start to the page on the disk.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedecho.core.loop import Moment, SentDispatch
from fedecho.core.server import Receipt, Step
from fedecho.core.types import GlobalModel, Weights
from fedecho.runs.record import Record
from fedecho.simulation.runtimes import Runtimes

METHODS = ("fedbuff", "ca2fl", "fedac", "fadas", "fedecho")
LIMIT_S, LIMIT_BYTES = 20.0, 6_000_000
NUM_CLASSES = 10
ECHO = ("distillation_loss", "teacher_entropy", "soft_weight", "distill_grad_norm", "clipped_share", "teacher_age")


def make_run(
    folder: Path, method: str, seed: int, *, num_clients: int = 50, num_versions: int = 500, buffer_size: int = 5,
    concurrency: int = 25,
) -> None:  # fmt: skip
    """A run as the simulator would have recorded it, without any learning: every tenth job is lost, some are rejected."""
    folder.mkdir(parents=True)
    dice = np.random.default_rng(seed)
    sizes = dice.integers(100, 2000, num_clients).tolist()
    runtimes = Runtimes().assign(sizes, seed)
    labels = [
        {str(k): int(n) for k, n in enumerate(dice.multinomial(size, dice.dirichlet([0.1] * NUM_CLASSES))) if n}
        for size in sizes
    ]
    classes = [runtimes.class_of(client) for client in range(num_clients)]
    header = {
        "format": 1, "name": "made-up", "algorithm": method, "seed": seed, "num_versions": num_versions,
        "config": {"name": "made-up", "seed": seed, "algorithm": {"name": method}},
        "execution": {"executor": "serial", "workers": 1},
        "software": {"fedecho": "0", "python": "3", "torch": "2", "numpy": "2", "platform": "none"}, "command": "made up",
        "started": "", "num_params": 11_000_000, "clients": {"examples": sizes, "classes": classes, "labels": labels},
    }  # fmt: skip
    record = Record.new(folder, runtimes.class_of, header)
    _live(record, runtimes, method, seed, num_clients, num_versions, buffer_size, concurrency)
    record.close()


def _live(
    record: Record,
    runtimes: object,
    method: str,
    seed: int,
    num_clients: int,
    num_versions: int,
    buffer_size: int,
    concurrency: int,
) -> None:
    dice, now, version, number, waiting = np.random.default_rng(seed), 0.0, 0, 0, 0
    work: dict[int, tuple[float, int, int]] = {}
    nothing = GlobalModel(0, Weights(*2 * (None,)))
    sent: list[SentDispatch] = []

    def refill() -> None:
        nonlocal number
        idle = [client for client in dice.integers(0, num_clients, 4 * concurrency).tolist() if client not in work]
        while len(work) < concurrency and idle:
            client = idle.pop()
            if client not in work:
                work[client] = (now + runtimes.draw(client, number), number, version)
                sent.append(SentDispatch(now, number, client, version))
                number += 1

    refill()
    while version < num_versions:
        client = min(work, key=lambda who: work[who][0])
        now, mine, base = work.pop(client)
        status = ("lost", "rejected")[int(dice.integers(2))] if dice.random() < 0.1 else "accepted"
        reason = "" if status == "accepted" else "client dropped out" if status == "lost" else "delta is not finite"
        receipt = Receipt(status, client, reason, "", mine, base, version - base, 1.0, {"loss": float(dice.random())})
        waiting += status == "accepted"
        refill()
        step = None
        if waiting == buffer_size:
            waiting, version = 0, version + 1
            metrics = {name: float(dice.random()) for name in ECHO} | {"num_teachers": 9} if method == "fedecho" else {}
            step = Step(replace(nothing, version=version), metrics)
        record.moment(Moment(now, receipt, step, tuple(sent)))
        sent.clear()
        if step is not None:
            curve = 1 - np.exp(-version / 120) + 0.03 * dice.standard_normal(NUM_CLASSES + 1)
            scores = {"accuracy": float(curve[-1]), "loss": 0.1} | {
                f"accuracy_class_{k}": float(curve[k]) for k in range(NUM_CLASSES)
            }
            costs = {"real_s": 0.2 * version, "clients_s": 0.1 * version, "server_s": 0.05 * version, "versions_alive": 9}
            record.evaluation(version, now, scores, costs | {"peak_bytes": 10**9})


def timed(folders: Path, page: Path) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fedecho.cli", "report", str(folders), "--out", str(page), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="a folder for the runs and the pages")
    with tempfile.TemporaryDirectory() as folder:
        root = parser.parse_args().keep or Path(folder)
        for method in METHODS:
            for seed in range(3):
                make_run(root / "many" / f"{method}-seed{seed}", method, seed)
        make_run(root / "wide", "fedecho", 0, num_clients=10_000, num_versions=500, buffer_size=50, concurrency=1000)
        for name, told in (("many", "500 versions, 50 clients, 5 methods, 3 seeds"), ("wide", "10,000 clients, 500 versions")):
            page = root / f"{name}.html"
            seconds = min(timed(root / name, page) for _ in range(2))
            size = page.stat().st_size
            print(f"{told}: {seconds:.1f} s (at most {LIMIT_S:.0f}), {size / 1e6:.2f} MB (below {LIMIT_BYTES / 1e6:.0f})")


if __name__ == "__main__":
    main()

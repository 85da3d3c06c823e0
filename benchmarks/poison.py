"""Cost of attacks and effect of the default defence: digits, 20 % attackers of each kind, FedBuff and FedEcho.

    python -m benchmarks.poison [--seeds 0,1,2] [--kinds scaled,sign_flip] [--json FILE]

20 clients, Dirichlet .3, Mc 10, M 5, 60 versions, large delays; accuracy is the mean of the last ten evaluations. "Lost" is against
the same seeds without attack and without defence.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import get_args

from benchmarks.arguments import listed
from fedecho import Experiment, load, simulate
from fedecho.runs.experiment import defended
from fedecho.simulation.attacks import Attack, Kind

SCALE = 10.0
SETTINGS = ["task.partition.alpha=0.3", "concurrency=10"]


def experiment(method: str, kind: str, seed: int, *, defence: bool) -> Experiment:
    size = "algorithm.inner.buffer_size=5" if method == "fedecho" else "algorithm.buffer_size=5"
    one = load("digits", algorithm=method, seed=seed, versions=60, settings=[*SETTINGS, size])
    one = replace(one, attack=Attack(kind=kind, scale=SCALE))  # type: ignore[arg-type]
    return defended(one) if defence else one


def accuracy(method: str, kind: str, seeds: list[int], *, defence: bool) -> float:
    """In per cent, over the seeds. A run that every defence refused to go on with has learnt nothing."""
    return 100 * mean(simulate(experiment(method, kind, seed, defence=defence)).accuracy for seed in seeds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=listed(int), default=[0, 1, 2])
    parser.add_argument("--kinds", type=listed(str, get_args(Kind)), default=list(get_args(Kind)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, rows = options.seeds, []
    print(f"{'method':<8} {'attack':<15} {'plain':>6} {'defended':>8} {'lost':>6} {'lost, defended':>14}")
    for method in ("fedbuff", "fedecho"):
        clean = accuracy(method, "none", seeds, defence=False)
        for kind in options.kinds:
            plain = clean if kind == "none" else accuracy(method, kind, seeds, defence=False)
            safe = accuracy(method, kind, seeds, defence=True)
            rows.append({"method": method, "attack": kind, "plain": plain, "defended": safe, "clean": clean})
            print(f"{method:<8} {kind:<15} {plain:6.1f} {safe:8.1f} {clean - plain:6.1f} {clean - safe:14.1f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Time whole CIFAR-10 runs of FedBuff and FedEcho on a GPU: 500 versions, an evaluation every 5.

    python -m benchmarks.gpu_runs [--seed 2] [--versions 500] [--json FILE]

Each method first runs a few versions, in which everything is compiled and captured that stays for the process; that is not counted,
nor is what a run does before its first dispatch. Needs CUDA and the data of ``fedecho run cifar10``.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.arguments import at_least_one, need_gpu
from benchmarks.kept import keep
from benchmarks.verdict import verdict
from fedecho import load, simulate
from fedecho.runs.on_gpu import select_gpu
from fedecho.tasks.data_files import MissingDataError

METHODS = ("fedbuff", "fedecho")
WARM_UP = 6
"""Versions; one of them is evaluated."""
MOST_S = {"fedbuff": 80.0, "fedecho": 110.0}
MOST_RATIO = 1.4
"""What we aim at on an H200."""


@dataclass(frozen=True)
class Row:
    """One run."""

    method: str
    seed: int
    num_versions: int
    real_s: float
    last10_accuracy: float


def run(method: str, seed: int, num_versions: int) -> Row:
    experiment = load("cifar10", algorithm=method, seed=seed)
    simulate(replace(experiment, num_versions=WARM_UP), executor="cuda")
    summary = simulate(replace(experiment, num_versions=num_versions), executor="cuda").summary
    return Row(method, seed, num_versions, summary.real_s, summary.last10_accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--versions", type=at_least_one, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu(parser)
    select_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-18, {options.versions} versions", flush=True)
    rows: dict[str, Row] = {}
    for method in METHODS:
        try:
            row = run(method, options.seed, options.versions)
        except MissingDataError as error:
            parser.error(str(error))
        rows[method] = row
        print(f"{method}: accuracy {100 * row.last10_accuracy:.2f}", flush=True)
        verdict("seconds", row.real_s, MOST_S[method])
    verdict("FedEcho's time over FedBuff's", rows["fedecho"].real_s / rows["fedbuff"].real_s, MOST_RATIO)
    keep(options.json, rows.values())


if __name__ == "__main__":
    main()

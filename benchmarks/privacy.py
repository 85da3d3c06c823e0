"""Cost of privacy: accuracy on digits against the noise, with the largest epsilon of any client.

    python -m benchmarks.privacy [--noise 0.003,0.01,0.03,0.1,1] [--seeds 0,1] [--json FILE]

20 clients, Dirichlet .3, Mc 10, M 5, 60 versions, large delays, updates clipped to norm 1; accuracy is the mean of the last ten.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from benchmarks.arguments import listed, positive
from fedecho import load, simulate
from fedecho.runs.summary import Summary

SETTINGS = ["task.partition.alpha=0.3", "concurrency=10", "privacy.clip_norm=1.0"]


def run(method: str, where: str, noise: float, seed: int) -> Summary:
    size = "algorithm.inner.buffer_size=5" if method == "fedecho" else "algorithm.buffer_size=5"
    private = [f"privacy.noise_multiplier={noise}", f"privacy.where={where}"]
    return simulate(load("digits", algorithm=method, seed=seed, versions=60, settings=[*SETTINGS, size, *private])).summary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--noise", type=listed(positive), default=[0.003, 0.01, 0.03, 0.1, 1.0])
    parser.add_argument("--seeds", type=listed(int), default=[0, 1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, rows = options.seeds, []
    print(f"{'method':<8} {'noise at':<8} {'multiplier':>10} {'accuracy':>8} {'largest epsilon':>16}")
    for method, where in (("fedbuff", "client"), ("fedecho", "client"), ("fedbuff", "server")):
        for noise in options.noise:
            done = [run(method, where, noise, seed) for seed in seeds]
            accuracy = 100 * mean(one.last10_accuracy for one in done)
            epsilon = max(one.privacy["largest_epsilon"] for one in done if one.privacy is not None)
            rows.append({"method": method, "where": where, "noise": noise, "accuracy": accuracy, "epsilon": epsilon})
            print(f"{method:<8} {where:<8} {noise:10.3f} {accuracy:8.1f} {epsilon:16.1f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

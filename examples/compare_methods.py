"""Compare two methods on two seeds: accuracies in the terminal, and a report to open.

python examples/compare_methods.py runs/my-comparison
"""

import sys
import tempfile
from pathlib import Path

from fedecho import load, simulate
from fedecho.report.page import MissingExtra, page, report_of

METHODS, SEEDS = ("fedbuff", "fedecho"), (0, 1)


def main(folder: Path) -> None:
    for name in METHODS:
        scores = []
        for seed in SEEDS:
            experiment = load("digits", algorithm=name, seed=seed, versions=50, settings=["task.partition.alpha=0.3"])
            scores.append(simulate(experiment, out=folder / f"{name}-seed{seed}").accuracy)
        print(f"{name}: {100 * sum(scores) / len(scores):.1f} %")
    try:
        (folder / "report.html").write_text(page(report_of([folder])), encoding="utf-8")
        print(f"report: {folder / 'report.html'}")
    except MissingExtra as missing:
        print(missing)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
        print("the runs were deleted; give a folder to keep them and the report")

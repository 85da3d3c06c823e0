"""The table and the picture of docs/text.md, from results/teachers: `python -m benchmarks.teachers.page`."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.derived import ROOT, fill, table
from benchmarks.drawing import COLORS, drawing
from benchmarks.teachers.watched import Run

RESULTS, PAGE, PICTURE = ROOT / "results/teachers", ROOT / "docs/text.md", ROOT / "docs/pictures/teachers.svg"
EVERY, LAST = 5, 50
"""An evaluation's versions, and those at a run's end that its means are of: its last ten evaluations are among them."""
HEAD = ["", "seed", "model, last ten evaluations", "model", "teacher", "one client", "model ± over versions", "teacher ±"]
HEAD += ["model says one class", "teacher does"]


def read_runs(folder: Path = RESULTS) -> list[Run]:
    rows = [row for path in folder.glob("*.json") for row in json.loads(path.read_text())["rows"]]
    return sorted((Run(**row) for row in rows), key=lambda run: (run.model_name, run.settings, run.seed))


def last_ten(run: Run) -> float:
    """What a table of the same run would say of it."""
    return 100 * fmean(run.model[EVERY - 1 :: EVERY][-10:])


def mean(values: list[float]) -> str:
    return f"{100 * fmean(values[-LAST:]):.2f}"


def spread(values: list[float]) -> str:
    return f"{100 * stdev(values[-LAST:]):.1f}"


def one_class(says_1: list[float]) -> str:
    """The share of all versions at which every pair has the same answer."""
    return f"{100 * fmean(said in (0.0, 1.0) for said in says_1):.0f} %"


def label(run: Run) -> str:
    method = {"fedbuff": "FedBuff", "fedecho": "FedEcho"}.get(run.algorithm, run.algorithm)
    own = [setting.rpartition(".")[2].replace("=", " ") for setting in run.settings]
    return ", ".join([run.model_name, method, *own])


def cells(run: Run) -> list[str]:
    means = [mean(run.model), mean(run.teacher), mean(run.clients)]
    others = [spread(run.model), spread(run.teacher), one_class(run.model_says_1), one_class(run.teacher_says_1)]
    return [label(run), str(run.seed), f"{last_ten(run):.2f}", *means, *others]


def parts(runs: list[Run]) -> dict[str, str]:
    return {"teachers": table(HEAD, [cells(run) for run in runs])}


def shown(runs: Iterable[Run]) -> None:
    print(f"{'':48}{'seed':>5}{'model':>9}{'teacher':>9}{'a client':>9}   mean of the last {LAST} versions, accuracy in %")
    for run in runs:
        means = "".join(f"{mean(values):>9}" for values in (run.model, run.teacher, run.clients))
        print(f"{label(run):48}{run.seed:5}{means}")


def draw(runs: list[Run], path: Path = PICTURE) -> None:
    with drawing(path, len(runs), 2.3) as panels:
        for axes, run in zip(panels, runs, strict=True):
            versions = range(1, len(run.model) + 1)
            axes.plot(versions, [100 * value for value in run.model], color=COLORS[0], linewidth=0.7, label="model")
            axes.plot(versions, [100 * value for value in run.teacher], color=COLORS[1], label="teacher")
            axes.set(title=f"seed {run.seed}", xlabel="version", ylim=(28, 92))
            axes.grid(True, linewidth=0.4, alpha=0.4)
        panels[0].set_ylabel("accuracy on validation pairs, %")
        panels[0].legend(loc="lower right")


if __name__ == "__main__":
    kept = read_runs()
    fill(PAGE, parts(kept))
    draw([run for run in kept if run.model_name == "all-mpnet-base-v2" and run.algorithm == "fedbuff"])

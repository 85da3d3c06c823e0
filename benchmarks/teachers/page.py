"""Two tables and a picture of docs/text-results.md, from results: `python -m benchmarks.teachers.page`."""

import json
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.derived import ROOT, fill, table
from benchmarks.drawing import COLORS, drawing
from benchmarks.teachers.watched import Run

RESULTS, PAGE, PICTURE = ROOT / "results/teachers", ROOT / "docs/text-results.md", ROOT / "docs/pictures/teachers.svg"
EVERY, LAST = 5, 50
"""An evaluation's versions, and those at a run's end that its means are of: its last ten evaluations are among them."""
HEAD = ["", "seed", "model", "teacher", "one client", "median lead", "teacher ahead", "model ±", "teacher ±"]
HEAD += ["one class: model", "teacher"]
MPNET, MINILM = "all-mpnet-base-v2", "all-MiniLM-L6-v2"
TWICE = {
    "MPNet-base, FedBuff": "mrpc/fedbuff-mpnet-base-seed{}.json",
    "MPNet-base, FedBuff again": f"teachers/teachers-{MPNET}-fedbuff-0-seed{{}}.json",
    "MPNet-base, FedEcho 3e-7": "mrpc/fedecho-mpnet-base-seed{}.json",
    "MPNet-base, FedEcho 3e-7 again": "again/mrpc/fedecho-mpnet-base-seed{}.json",
    "MPNet-base, FedEcho 3e-6": "mrpc/control-fedecho-distill-lr-3e-6-mpnet-base-seed{}.json",
    "MPNet-base, FedEcho 3e-5": f"teachers/teachers-{MPNET}-fedecho-3e-5-seed{{}}.json",
    "MiniLM, FedBuff": "mrpc/fedbuff-minilm-seed{}.json",
    "MiniLM, FedBuff again": f"teachers/teachers-{MINILM}-fedbuff-0-seed{{}}.json",
    "MiniLM, FedEcho 3e-7": "mrpc/fedecho-minilm-seed{}.json",
    "MiniLM, FedEcho 3e-5": "mrpc/control-fedecho-distill-lr-3e-5-minilm-seed{}.json",
}
"""What ran with the same seeds, and where its results are kept."""


def read_runs(folder: Path = RESULTS) -> list[Run]:
    rows = [row for path in folder.glob("*.json") for row in json.loads(path.read_text())["rows"]]
    return sorted((Run(**row) for row in rows), key=lambda run: (run.model_name, run.settings, run.seed))


def evaluations(path: Path) -> list[float]:
    """Of a cell of the table, or of a run that was watched: of that every fifth version, in the judge's batches."""
    kept = json.loads(path.read_text())
    return (
        list(kept["rows"][0]["model"][EVERY - 1 :: EVERY])
        if "rows" in kept
        else [line["accuracy"] for line in kept["evaluations"]]
    )


def twice(name: str, place: str, results: Path = RESULTS.parent) -> list[str]:
    found = {seed: results / place.format(seed) for seed in (0, 1, 2)}
    runs = {seed: evaluations(path) for seed, path in found.items() if path.is_file()}
    row = [name]
    for last in (10, 0):
        means = {seed: 100 * fmean(values[-last:]) for seed, values in runs.items()}
        row += [", ".join(f"{means[seed]:.2f}" if seed in means else "-" for seed in found)]
        row += [f"{fmean(means.values()):.2f}" if len(means) == len(found) else ""]
    return row


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
    leads = [teacher - model for teacher, model in zip(run.teacher[-LAST:], run.model[-LAST:], strict=True)]
    means = [mean(run.model), mean(run.teacher), mean(run.clients)]
    ahead = [f"{100 * median(leads):.2f}", f"{100 * fmean(lead > 0 for lead in leads):.0f} %"]
    others = [spread(run.model), spread(run.teacher), one_class(run.model_says_1), one_class(run.teacher_says_1)]
    return [label(run), str(run.seed), *means, *ahead, *others]


def parts(runs: list[Run]) -> dict[str, str]:
    head = ["", "last ten: seeds 0, 1, 2", "mean", "all 40: seeds 0, 1, 2", "mean"]
    return {
        "teachers": table(HEAD, [cells(run) for run in runs]),
        "twice": table(head, [twice(name, place) for name, place in TWICE.items()]),
    }


def shown(runs: list[Run]) -> None:
    width = max((len(label(run)) for run in runs), default=0)
    last = min([LAST, *(len(run.model) for run in runs)])
    print(
        f"{'':{width}}{'seed':>6}{'model':>9}{'teacher':>9}{'a client':>10}   mean of the last {last} versions, accuracy in %"
    )
    for run in runs:
        print(f"{label(run):{width}}{run.seed:6}{mean(run.model):>9}{mean(run.teacher):>9}{mean(run.clients):>10}")


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
    draw([run for run in kept if run.model_name == MPNET and run.algorithm == "fedbuff"])

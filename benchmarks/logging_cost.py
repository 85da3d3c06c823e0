"""What it costs to write everything down: a digits run that records, times itself and tracks, beside one that does none of it.

    python -m benchmarks.logging_cost

Both runs do the same learning and the same evaluations in one process, in turns, and the medians are compared.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from fedecho import Experiment, load, simulate
from fedecho.core.drive import drive
from fedecho.experiments.build import assembled, one_thread
from fedecho.experiments.state import Following, RunState
from fedecho.tracking import tracked

LIMIT = 1.02


def bare(experiment: Experiment) -> float:
    """The run and its evaluations; nothing is written anywhere."""
    began = time.perf_counter()
    with one_thread(), assembled(experiment) as simulation:

        def watch(moment: object) -> None:
            step = moment.step
            if step is not None and step.model.version % experiment.eval_every == 0:
                simulation.evaluate()

        drive(simulation.server, simulation.transport, num_versions=experiment.num_versions, watch=watch)
    return time.perf_counter() - began


def logged(experiment: Experiment, sinks: tuple[str, ...]) -> float:
    """The record, the checkpoint at its usual pace, the progress' state and the sinks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with tracked(sinks, out) as tracker:
            follow = Following(out, RunState(experiment.num_versions), lambda state: None)

            def watch(moment: object, scores: object) -> None:
                tracker(moment, scores)
                follow(moment, scores)

            began = time.perf_counter()
            simulate(experiment, out=out, watch=watch)
            return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    experiment = load("digits", algorithm="fedecho")
    bare(experiment), logged(experiment, ("tensorboard",))
    times = [(bare(experiment), logged(experiment, ()), logged(experiment, ("tensorboard",))) for _ in range(repeats)]
    nothing, record, board = (median(column) for column in zip(*times, strict=True))
    fastest = [min(column) for column in zip(*times, strict=True)]
    print(f"digits, FedEcho, {experiment.num_versions} versions, {repeats} times in turns; medians (fastest in brackets)")
    print(f"  nothing written {nothing:.2f} s ({fastest[0]:.2f})")
    for name, spent, best in (("record", record, fastest[1]), ("record and TensorBoard", board, fastest[2])):
        print(f"  {name} {spent:.2f} s: ratio {spent / nothing:.3f} ({best / fastest[0]:.3f}), at most {LIMIT}")


if __name__ == "__main__":
    main()

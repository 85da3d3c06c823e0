"""Stop a run in the middle and resume it: the final model is bit-identical to that of an uninterrupted run.

Here the run stops itself. After Ctrl-C it resumes at the same point, after a crash or a power cut from the last checkpoint.
"""

import signal
import tempfile
from pathlib import Path

from fedecho import load, resume, simulate
from fedecho.runs.run import Interrupted


def stop_at(version: int):
    """A watch that interrupts the run at a version, as Ctrl-C would."""

    def watch(moment, scores) -> None:
        if moment.step is not None and moment.step.model.version == version:
            signal.raise_signal(signal.SIGINT)

    return watch


if __name__ == "__main__":
    experiment = load("digits", algorithm="fedecho", versions=30, settings=["task.partition.alpha=0.3"])
    whole = simulate(experiment)
    print(f"uninterrupted: {100 * whole.accuracy:.1f} %")
    with tempfile.TemporaryDirectory() as folder:
        try:
            simulate(experiment, out=Path(folder) / "run", watch=stop_at(12))
        except Interrupted as stopped:
            print(stopped)
        again = resume(Path(folder) / "run")
    print(f"stopped and resumed: {100 * again.accuracy:.1f} %")
    assert again.summary.model_sha256 == whole.summary.model_sha256, "the models differ"
    print(f"bit-identical models: {again.summary.model_sha256[:16]}…")

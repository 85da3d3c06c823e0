"""Experiment tracking with TensorBoard, Weights & Biases and MLflow. ``SINKS`` maps names to sinks."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedecho.tracking.sinks import MlflowSink, Sink, TensorBoardSink, WandbSink
from fedecho.tracking.tracker import Tracker

SINKS: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}

__all__ = ["SINKS", "Sink", "Tracker", "check_sinks", "tracked"]


def check_sinks(names: Sequence[str]) -> None:
    """Check before a run that the sinks exist and their packages are installed."""
    for name in names:
        if name not in SINKS:
            close = get_close_matches(name, list(SINKS), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it must be one of {', '.join(SINKS)}"
            raise ValueError(f"unknown --track {name!r}: {hint}")
        if not _is_installed(name):
            raise ValueError(f"--track {name} needs the package {name}, which is not installed: pip install 'fedecho[{name}]'")


def _is_installed(package: str) -> bool:
    """Is the package installed? Importing it could take seconds."""
    return sys.modules[package] is not None if package in sys.modules else find_spec(package) is not None


@contextmanager
def tracked(
    names: Sequence[str],
    folder: Path | str,
    config: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Tracker]:
    """A watch for ``simulate(..., watch=...)`` that logs to the named sinks in the background, without delaying the run."""
    check_sinks(names)
    tracker = Tracker({name: partial(SINKS[name], Path(folder), config or {}) for name in names}, say)
    try:
        yield tracker
    finally:
        tracker.close()

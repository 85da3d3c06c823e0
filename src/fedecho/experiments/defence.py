"""The default defence against bad clients, as one change to an experiment."""

from dataclasses import replace
from typing import Any

from fedecho.experiments.experiment import Experiment

MAX_NORM_RATIO = 3.0
"""Above it an update is refused: honest ones differ by how much data a client has, attackers by more."""


def defended(experiment: Experiment) -> Experiment:
    """Refuse norms above three times the running median, clip the rest to the buffer's median, and trim the teachers.

    A method without a rule for its step (CA2FL, FedAC, FedAsync, FedAvg) gets the first of the three alone.
    """
    admission = replace(experiment.admission, max_norm_ratio=MAX_NORM_RATIO)
    return replace(experiment, admission=admission, algorithm=_defended(experiment.algorithm))


def _defended(algorithm: Any) -> Any:
    if hasattr(algorithm, "distiller"):
        distiller = replace(algorithm.distiller, teacher="trimmed")
        return replace(algorithm, distiller=distiller, inner=_defended(algorithm.inner))
    return replace(algorithm, combine="clipped") if hasattr(algorithm, "combine") else algorithm

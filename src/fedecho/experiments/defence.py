"""The default defence against bad clients, as one change to an experiment."""

from dataclasses import replace
from typing import Any

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho
from fedecho.experiments.experiment import Experiment

MAX_NORM_RATIO = 3.0
"""Above it an update is refused: honest ones differ by how much data a client has, attackers by more."""


def defended(experiment: Experiment) -> Experiment:
    """Refuse norms above three times the usual, clip the rest to the buffer's median, and trim the teachers.

    BatchNorm's statistics become a median. CA2FL and FedAsync have no rule for their step and get the median of statistics alone;
    a user's own method gets the bounds on norms alone. docs/security.md has the table.
    """
    admission = replace(experiment.admission, max_norm_ratio=MAX_NORM_RATIO)
    return replace(experiment, admission=admission, algorithm=_defended(experiment.algorithm))


def _defended(algorithm: Any) -> Any:
    match algorithm:
        case FedEcho(distiller=distiller, inner=inner):
            return replace(algorithm, distiller=replace(distiller, teacher="trimmed"), inner=_defended(inner))
        case FedBuff() | FADAS() | FedAvg() | FedAC():
            return replace(algorithm, combine="clipped")
        case CA2FL() | FedAsync():
            return replace(algorithm, statistics="median")
        case _:
            return algorithm

"""Properties of a method that a deployment needs: client weighting, its name, the size of its unlabeled set."""

from dataclasses import replace
from typing import Any

from fedecho.algorithms.fadas import FADAS
from fedecho.algorithms.fedavg import FedAvg
from fedecho.algorithms.fedbuff import FedBuff
from fedecho.algorithms.fedecho import FedEcho
from fedecho.core.algorithm import Algorithm
from fedecho.runs.identity import name_of


def by_examples(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Weight clients by their number of examples, as Flower's own strategies do (the FedEcho paper does not).

    Applies to methods that take a mean, also inside FedEcho. A robust ``combine`` stays unweighted, because a client may claim
    any number of examples.
    """
    if isinstance(algorithm, FedEcho):
        return replace(algorithm, inner=by_examples(algorithm.inner))
    if isinstance(algorithm, FedAvg) or (isinstance(algorithm, FedBuff | FADAS) and algorithm.combine == "mean"):
        return replace(algorithm, weighted=True)
    return algorithm


def is_weighted(algorithm: object) -> bool:
    if isinstance(algorithm, FedEcho):
        return is_weighted(algorithm.inner)
    return isinstance(algorithm, FedAvg | FedBuff | FADAS) and algorithm.weighted


def method_of(algorithm: object) -> str:
    """A method's name, including the name of the inner method."""
    return f"{name_of(algorithm)} over {method_of(algorithm.inner)}" if isinstance(algorithm, FedEcho) else name_of(algorithm)


def num_unlabeled_of(algorithm: object) -> int | None:
    """The size of the unlabeled set U. None without distillation."""
    student = algorithm.student if isinstance(algorithm, FedEcho) else None
    return None if student is None else student.num_unlabeled

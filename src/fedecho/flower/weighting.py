"""Means by the clients' numbers of examples, which Flower's own strategies take and the FedEcho paper's methods do not."""

from dataclasses import replace
from typing import Any

from fedecho.algorithms.fadas import FADAS
from fedecho.algorithms.fedavg import FedAvg
from fedecho.algorithms.fedbuff import FedBuff
from fedecho.algorithms.fedecho import FedEcho


def by_examples(algorithm: Any) -> Any:
    """The algorithm with ``weighted`` where it takes a mean, inside FedEcho too; any other as it is.

    A robust ``combine`` stays unweighted: a client may claim any number of examples.
    """
    if isinstance(algorithm, FedEcho):
        return replace(algorithm, inner=by_examples(algorithm.inner))
    if isinstance(algorithm, FedAvg) or (isinstance(algorithm, FedBuff | FADAS) and algorithm.combine == "mean"):
        return replace(algorithm, weighted=True)
    return algorithm


def is_weighted(algorithm: Any) -> bool:
    if isinstance(algorithm, FedEcho):
        return is_weighted(algorithm.inner)
    return isinstance(algorithm, FedAvg | FedBuff | FADAS) and algorithm.weighted

"""A method as a deployment looks at it: how it counts clients, what it is called, what it distils on.

Flower's own strategies count clients by their examples; the FedEcho paper's methods do not.
"""

from dataclasses import replace
from typing import Any

from fedecho.algorithms.fadas import FADAS
from fedecho.algorithms.fedavg import FedAvg
from fedecho.algorithms.fedbuff import FedBuff
from fedecho.algorithms.fedecho import FedEcho
from fedecho.runs.identity import name_of


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


def method_of(algorithm: Any) -> str:
    """A method's name, with that of the one inside."""
    return f"{name_of(algorithm)} over {method_of(algorithm.inner)}" if isinstance(algorithm, FedEcho) else name_of(algorithm)


def num_unlabeled_of(algorithm: Any) -> int | None:
    """How many examples U has; None without distillation."""
    student = algorithm.student if isinstance(algorithm, FedEcho) else None
    return None if student is None else student.num_unlabeled

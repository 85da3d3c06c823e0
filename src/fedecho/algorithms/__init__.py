"""The algorithms, one file per paper. ``ALGORITHMS`` maps their names to classes."""

from typing import Any

from fedecho.algorithms.ca2fl import CA2FL
from fedecho.algorithms.fadas import FADAS
from fedecho.algorithms.fedac import FedAC
from fedecho.algorithms.fedasync import FedAsync
from fedecho.algorithms.fedavg import FedAvg
from fedecho.algorithms.fedbuff import FedBuff
from fedecho.algorithms.fedecho import FedEcho, FedEchoPlus

ALGORITHMS: dict[str, type[Any]] = {
    "fedavg": FedAvg,
    "fedasync": FedAsync,
    "fedbuff": FedBuff,
    "ca2fl": CA2FL,
    "fedac": FedAC,
    "fadas": FADAS,
    "fedecho": FedEcho,
    "fedecho+": FedEchoPlus,
}

__all__ = ["ALGORITHMS", "CA2FL", "FADAS", "FedAC", "FedAsync", "FedAvg", "FedBuff", "FedEcho", "FedEchoPlus"]

"""A client's local training."""

from fedecho.learning.local import LocalTraining
from fedecho.learning.trainer import Trainer

__all__ = ["LocalTraining", "Trainer"]

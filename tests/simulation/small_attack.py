"""One dispatch and one update."""

import torch

from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights

UPDATE = ClientUpdate(1, 0, torch.tensor([1.0, -2.0, 0.5]), torch.zeros(0), 7, 3)


def dispatch() -> Dispatch:
    return Dispatch(0, 1, GlobalModel(0, Weights(torch.zeros(3), torch.zeros(0))), 11)

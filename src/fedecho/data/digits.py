"""The embedded UCI handwritten digits (Alpaydin and Kaynak, 1998; CC BY 4.0): 1,797 images of 8 x 8 with values 0 to 16."""

from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedecho.core.rng import numpy_rng

NUM_TEST = 360


class Digits(NamedTuple):
    """Images [n, 1, 8, 8] in [0, 1] and labels."""

    images: Tensor
    labels: Tensor


def read_digits() -> tuple[Digits, Digits]:
    """(training, test) images. The split is fixed: it does not move with a run's seed."""
    with files("fedecho.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.float32) / 16.0)[:, None]
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    order = torch.from_numpy(numpy_rng(0, "digits", "split").permutation(len(labels)))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])

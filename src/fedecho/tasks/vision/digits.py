"""UCI handwritten digits (Alpaydin and Kaynak, 1998; CC BY 4.0), included in the package: trains in seconds on a laptop."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.randomness import numpy_rng
from fedecho.core.ranges import NumClients, Seed, at_least, between, check_ranges
from fedecho.tasks.classification import counts_of, seeded, top1
from fedecho.tasks.partition import DirichletPartitioner, Partitioner, Parts, as_parts

NUM_TEST = 360


class Digits(NamedTuple):
    """Images [n, 1, 8, 8] in [0, 1] and labels."""

    images: Tensor
    labels: Tensor


def read_digits() -> tuple[Digits, Digits]:
    """Return (training, test) images. The split is fixed and does not depend on a run's seed."""
    with files("fedecho.tasks.vision").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.float32) / 16.0)[:, None]
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    order = torch.from_numpy(numpy_rng(0, "digits", "split").permutation(len(labels)))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def small_cnn(num_classes: int = 10, width: int = 16) -> nn.Module:
    """Return a network of two BatchNorm convolutions and a linear layer: 9,978 parameters at width 16."""
    network = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, num_classes),
    )
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, kw_only=True)
class DigitsTask:
    """UCI digits; ``num_unlabeled`` of the 1,437 training images are held out as U, without labels."""

    num_clients: NumClients = 20
    num_unlabeled: Annotated[int, between(0, 1000)] = 300
    partition: Partitioner = field(default_factory=lambda: DirichletPartitioner(alpha=0.1))
    width: Annotated[int, at_least(1, most=4096)] = 16
    seed: Seed | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "task.")

    @property
    def num_classes(self) -> int:
        return 10

    def network(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: small_cnn(width=self.width))

    def num_examples(self, client: int) -> int:
        return self._parts.size(client)

    def label_counts(self, client: int) -> dict[int, int]:
        """Return the number of a client's examples of each class, for the record."""
        return counts_of(self._split[0].labels, torch.from_numpy(self._parts[client]))

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        examples, train = torch.from_numpy(self._parts[client])[rows], self._split[0]
        return train.images[examples], train.labels[examples]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(module(images), labels)

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        logits: Tensor = module(self._split[1].images[rows])
        return logits

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        _, _, test = self._split
        return top1(module, test.images, test.labels)

    @cached_property
    def _split(self) -> tuple[Digits, Digits, Digits]:
        """Return (labelled training images, U, test images); the seed selects the images held out."""
        train, test = read_digits()
        order = torch.from_numpy(numpy_rng(self.seed or 0, "unlabeled").permutation(len(train.labels)))
        unlabeled, labelled = order[: self.num_unlabeled], order[self.num_unlabeled :]
        held, kept = (Digits(train.images[rows], train.labels[rows]) for rows in (unlabeled, labelled))
        return kept, held, test

    @cached_property
    def _parts(self) -> Parts:
        return as_parts(self.partition.split(self._split[0].labels.numpy(), self.num_clients, self.seed or 0))

"""Handwritten digits, embedded: small enough for a laptop, real enough to show what stragglers do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.ranges import NumClients, Seed, at_least, between, check_ranges
from fedecho.core.rng import numpy_rng
from fedecho.data.digits import Digits, read_digits
from fedecho.data.partition import DirichletPartitioner, Partitioner
from fedecho.data.parts import Parts, as_parts
from fedecho.models.small_cnn import small_cnn
from fedecho.tasks.classification import counts_of, seeded, top1


@dataclass(frozen=True, kw_only=True)
class DigitsTask:
    """UCI digits over ``num_clients``; ``num_unlabeled`` of the 1,437 training images are held out as U, without labels."""

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
        """How many examples of each class a client holds; for the record alone."""
        return counts_of(self._split[0].labels, torch.from_numpy(self._parts[client]))

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mine, train = torch.from_numpy(self._parts[client])[rows], self._split[0]
        return train.images[mine], train.labels[mine]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(module(images), labels)

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        logits: Tensor = module(self._unlabeled[rows])
        return logits

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return top1(module, self._test.images, self._test.labels)

    @cached_property
    def _split(self) -> tuple[Digits, Digits, Digits]:
        """(labelled training images, U, test images); which ones are held out moves with the seed."""
        train, test = read_digits()
        order = torch.from_numpy(numpy_rng(self.seed or 0, "unlabeled").permutation(len(train.labels)))
        held, kept = order[: self.num_unlabeled], order[self.num_unlabeled :]
        return Digits(train.images[kept], train.labels[kept]), Digits(train.images[held], train.labels[held]), test

    @cached_property
    def _parts(self) -> Parts:
        return as_parts(self.partition.split(self._split[0].labels.numpy(), self.num_clients, self.seed or 0))

    @property
    def _unlabeled(self) -> Tensor:
        return self._split[1].images

    @property
    def _test(self) -> Digits:
        return self._split[2]

"""CIFAR-10 and CIFAR-100 with ResNet-18, the paper's vision task."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from fedecho.core.ranges import NumClients, Seed, at_least, check_ranges
from fedecho.storage.files import arrays_sha256
from fedecho.tasks.classification import counts_of, seeded, top1
from fedecho.tasks.data_files import find
from fedecho.tasks.partition import DirichletPartitioner, Partitioner, Parts, as_parts
from fedecho.tasks.vision.cifar_files import read_cifar10, read_cifar100
from fedecho.tasks.vision.images import Images, Pixels
from fedecho.tasks.vision.resnet import resnet18
from fedecho.tasks.vision.unlabeled import read_unlabeled

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
PAD, SIDE = 4, 32
EVAL_CHUNK = 500
NUM_CROPS = (2 * PAD + 1) ** 2


@dataclass(frozen=True, kw_only=True)
class CifarTask:
    """Image classification on 50,000 images, randomly cropped and flipped. U is ``num_unlabeled`` unaugmented images.

    ``unlabeled`` is their source: cifar10, cifar100, stl10, synthetic, or the path of a folder of images or a .npy array.
    """

    dataset: Literal["cifar10", "cifar100"] = "cifar10"
    num_clients: NumClients = 50
    partition: Partitioner = field(default_factory=lambda: DirichletPartitioner(alpha=0.1))
    unlabeled: str = "cifar100"
    num_unlabeled: Annotated[int, at_least(0, most=10**8)] = 2000
    augment: bool = True
    width: Annotated[int, at_least(1, most=1024)] = 64
    data_dir: str | None = None
    seed: Seed | None = None
    device: str = field(default="cpu", repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ranges(self, "task.")

    def on(self, device: str) -> "CifarTask":
        """Return the same task with its images on a device."""
        return replace(self, device=device)

    @property
    def num_classes(self) -> int:
        return 10 if self.dataset == "cifar10" else 100

    def network(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: resnet18(self.num_classes, self.width))

    def num_examples(self, client: int) -> int:
        return self._parts.size(client)

    def label_counts(self, client: int) -> dict[int, int]:
        """Return the number of a client's examples of each class, for the record."""
        return counts_of(torch.as_tensor(self._sets[0].labels), self.rows_of(client))

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        draws = self.draw(len(rows), generator)
        return self.pick(self.resident(), self.rows_of(client)[rows].to(self.device), draws.to(self.device))

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return self.row_losses(module(images), labels).mean()

    def rows_of(self, client: int) -> Tensor:
        """Return the client's rows among all training images."""
        return torch.from_numpy(self._parts[client])

    def draw(self, num: int, generator: torch.Generator) -> Tensor:
        """Draw a crop and a flip for each image, as one number; without augmentation, the centre crop."""
        if not self.augment:
            return torch.full((num,), NUM_CROPS // 2)
        return torch.randint(2 * NUM_CROPS, (num,), generator=generator)

    def resident(self) -> tuple[Tensor, ...]:
        return self._padded, self._labels, *_mean_and_std(self._padded.device)

    @staticmethod
    def pick(resident: tuple[Tensor, ...], rows: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return training images, cropped and flipped on their device, and their labels."""
        padded, labels, mean, std = resident
        side = torch.arange(SIDE, device=rows.device)
        flip, crop = draws // NUM_CROPS, draws % NUM_CROPS
        down = (crop // (2 * PAD + 1))[:, None] + side
        across = torch.where(flip[:, None] == 1, SIDE - 1 - side, side) + (crop % (2 * PAD + 1))[:, None]
        pixels = padded[rows[:, None, None], down[:, :, None], across[:, None, :]]
        return normalized(pixels, mean, std), labels[rows]

    @staticmethod
    def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, reduction="none")

    def unlabeled_images(self, rows: Tensor) -> Tensor:
        return self._unlabeled[rows]

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        logits: Tensor = module(self.unlabeled_images(rows))
        return logits

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        images, labels = self._test
        return top1(module, images, labels, EVAL_CHUNK)

    def read_inputs(self, unlabeled: bool) -> Mapping[str, str]:
        """Read all inputs and return their digests (see ``HasInputs``), with the provenance of U."""
        train, test = self._sets
        digests: dict[str, str] = {self.dataset: arrays_sha256([train.pixels, train.labels, test.pixels, test.labels])}
        if unlabeled and self.num_unlabeled:
            digests["U"] = f"{arrays_sha256([self._unlabeled_images.pixels])} of {self.provenance}"
        return digests

    @property
    def provenance(self) -> str:
        """Describe the files U came from, so that results on a substitute are labelled."""
        return self._unlabeled_images.provenance

    @cached_property
    def _sets(self) -> tuple[Images, Images]:
        read = read_cifar10 if self.dataset == "cifar10" else read_cifar100
        return read(find(self.dataset, self.data_dir))

    @cached_property
    def _parts(self) -> Parts:
        labels = self._sets[0].labels
        return as_parts(self.partition.split(np.zeros(0) if labels is None else labels, self.num_clients, self.seed or 0))

    @cached_property
    def _padded(self) -> Tensor:
        return pad(torch.from_numpy(self._sets[0].pixels), (0, 0, PAD, PAD, PAD, PAD)).to(self.device)

    @cached_property
    def _labels(self) -> Tensor:
        return torch.as_tensor(self._sets[0].labels).to(self.device)

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor]:
        test = self._sets[1]
        return self._normalized(test.pixels), torch.as_tensor(test.labels).to(self.device)

    @cached_property
    def _unlabeled_images(self) -> Images:
        return read_unlabeled(self.unlabeled, self.data_dir, self.num_unlabeled, self.seed or 0)

    def _normalized(self, pixels: Pixels) -> Tensor:
        """Normalize images that are never augmented, once."""
        on_device = torch.from_numpy(np.ascontiguousarray(pixels)).to(self.device)
        return normalized(on_device, *_mean_and_std(on_device.device))

    @cached_property
    def _unlabeled(self) -> Tensor:
        return self._normalized(self._unlabeled_images.pixels)


def normalized(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Convert uint8 [n, h, w, 3] to normalized floats [n, 3, h, w], channels-last in memory."""
    return ((pixels.float() / 255.0 - mean) / std).permute(0, 3, 1, 2)


@cache
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    """Cached, because a copy from the host cannot be part of a captured graph."""
    return torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)

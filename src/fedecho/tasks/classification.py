"""What the classification tasks share."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.randomness import global_rng
from fedecho.core.task import at


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A module whose initial weights depend on ``seed`` alone; the caller's random state is left as it was."""
    with global_rng(torch.device("cpu"), seed, "initial weights"):
        return make()


def top1(module: nn.Module, images: Tensor, labels: Tensor, chunk: int = 1000) -> Mapping[str, float]:
    """Accuracy (0 to 1) and mean loss, a chunk at a time."""
    with torch.no_grad():
        logits = torch.cat([module(part) for part in in_parts(images, chunk)])
        right = logits.argmax(dim=-1) == labels
        scores = {"accuracy": int(right.sum()) / len(labels), "loss": float(cross_entropy(logits, labels))}
        return scores | _of_each_class(right.cpu(), labels.cpu(), logits.shape[-1])


def in_parts(images: Tensor, chunk: int) -> Iterator[Tensor]:
    for start in range(0, len(images), chunk):
        at(start, len(images))
        yield images[start : start + chunk]


def _of_each_class(right: Tensor, labels: Tensor, num_classes: int) -> dict[str, float]:
    """Accuracy class by class (0 where the test set has none of it): who was forgotten shows only here."""
    hits, all_of = (labels[right].bincount(minlength=num_classes), labels.bincount(minlength=num_classes))
    shares = (hits / all_of.clamp_min(1)).tolist()
    return {f"accuracy_class_{name}": share for name, share in enumerate(shares)}


def counts_of(labels: Tensor, rows: Tensor | None = None) -> dict[int, int]:
    """How many examples there are of each label that occurs."""
    found, counts = torch.unique(labels if rows is None else labels[rows], return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))

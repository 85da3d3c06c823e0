"""Helpers shared by the classification tasks."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.randomness import global_rng
from fedecho.core.task import report_progress


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module whose initial weights depend only on ``seed``; the caller's random state is unchanged."""
    with global_rng(torch.device("cpu"), seed, "initial weights"):
        return make()


def top1(module: nn.Module, images: Tensor, labels: Tensor, chunk: int = 1000) -> Mapping[str, float]:
    """Return accuracy (0 to 1), mean loss and per-class accuracy, computed in chunks."""
    with torch.no_grad():
        logits = torch.cat([module(part) for part in chunks(images, chunk)])
        right = logits.argmax(dim=-1) == labels
        scores = {"accuracy": int(right.sum()) / len(labels), "loss": float(cross_entropy(logits, labels))}
        return scores | _accuracy_by_class(right.cpu(), labels.cpu(), logits.shape[-1])


def chunks(images: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yield the images in chunks and report progress."""
    for start in range(0, len(images), chunk):
        report_progress(start, len(images))
        yield images[start : start + chunk]


def _accuracy_by_class(right: Tensor, labels: Tensor, num_classes: int) -> dict[str, float]:
    """Return the accuracy of each class, 0 if the test set lacks it. It shows which classes are forgotten."""
    hits, totals = labels[right].bincount(minlength=num_classes), labels.bincount(minlength=num_classes)
    shares = (hits / totals.clamp_min(1)).tolist()
    return {f"accuracy_class_{name}": share for name, share in enumerate(shares)}


def counts_of(labels: Tensor, rows: Tensor | None = None) -> dict[int, int]:
    """Return the number of examples of each label that occurs."""
    values, counts = torch.unique(labels if rows is None else labels[rows], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))

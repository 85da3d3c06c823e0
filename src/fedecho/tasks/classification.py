"""What the classification tasks share."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.rng import global_rng


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A module whose initial weights depend on ``seed`` alone; the caller's random state is left as it was."""
    with global_rng(torch.device("cpu"), seed, "initial weights"):
        return make()


def top1(module: nn.Module, images: Tensor, labels: Tensor, chunk: int = 1000) -> Mapping[str, float]:
    """Accuracy (0 to 1) and mean loss, a chunk at a time."""
    with torch.no_grad():
        logits = torch.cat([module(part) for part in images.split(chunk)])
        right = int((logits.argmax(dim=-1) == labels).sum())
        return {"accuracy": right / len(labels), "loss": float(cross_entropy(logits, labels))}

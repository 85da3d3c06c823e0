"""Clients that mean harm, for testing defences: what a share of the clients does to its data, its updates or its pace."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedecho.core.numbers import NumberSet
from fedecho.core.rng import numpy_rng, torch_rng
from fedecho.core.task import Task
from fedecho.core.types import ClientUpdate, Dispatch
from fedecho.simulation.runtimes import ClientRuntimes

Kind = Literal["none", "label_flip", "sign_flip", "scaled", "noise", "logit_backdoor", "flood"]
KINDS = ("none", "label_flip", "sign_flip", "scaled", "noise", "logit_backdoor", "flood")
FLOOD = 50.0
"""A flooding client reports so many times as often."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """``share`` of the clients, drawn by the seed, attack.

    ``label_flip`` trains on C - 1 - y. ``sign_flip`` sends -scale Delta, ``scaled`` scale Delta, ``noise`` a random vector of scale
    times Delta's norm. ``logit_backdoor`` trains on the label ``target`` alone and sends scale times that, so that its logits on
    the whole of U shout it. ``flood`` flips labels and answers 50 times as fast.
    """

    kind: Kind = "none"
    share: float = 0.2
    scale: float = 5.0
    target: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"attack.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0 <= self.share < 1:
            raise ValueError(f"attack.share must be at least 0 and below 1, got {self.share}")
        if not self.scale > 0:
            raise ValueError(f"attack.scale must be above 0, got {self.scale}")
        if self.target < 0:
            raise ValueError(f"attack.target must be at least 0, got {self.target}")

    def attackers(self, num_clients: int, seed: int) -> Set[int]:
        if self.kind == "none":
            return NumberSet()
        order = numpy_rng(seed, "attackers").permutation(num_clients)
        return NumberSet(map(int, order[: int(self.share * num_clients + 1e-9)]))

    @property
    def poisons_data(self) -> bool:
        return self.kind in ("label_flip", "logit_backdoor", "flood")

    def sent(self, dispatch: Dispatch, update: ClientUpdate) -> ClientUpdate:
        """What an attacker sends in place of its update."""
        if self.kind == "sign_flip":
            return replace(update, delta=update.delta * -self.scale)
        if self.kind in ("scaled", "logit_backdoor"):
            return replace(update, delta=update.delta * self.scale)
        if self.kind == "noise":
            return replace(update, delta=self._noise(update.delta, dispatch.seed))
        return update

    def _noise(self, delta: Tensor, seed: int) -> Tensor:
        noise = torch.randn(delta.shape, generator=torch_rng(seed, "attack")).to(delta)
        return noise.mul_(self.scale * torch.linalg.vector_norm(delta) / torch.linalg.vector_norm(noise))


@dataclass(frozen=True)
class PoisonedTask:
    """A task whose attackers see false labels; everything else is the task's own. Batches must be (inputs, labels)."""

    task: Task
    attack: Attack
    attackers: Set[int]
    num_classes: int

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Any:
        batch = self.task.batch(client, rows, generator)
        if client not in self.attackers:
            return batch
        inputs, labels = batch
        if self.attack.kind == "logit_backdoor":
            return inputs, torch.full_like(labels, self.attack.target)
        return inputs, self.num_classes - 1 - labels

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "task":  # unpickling asks before there is a task
            raise AttributeError(name)
        return getattr(self.task, name)


@dataclass(frozen=True)
class FloodedRuntimes:
    """Attackers answer 50 times as fast."""

    runtimes: ClientRuntimes
    attackers: Set[int]

    def class_of(self, client: int) -> str:
        return self.runtimes.class_of(client)

    def draw(self, client: int, dispatch: int) -> float:
        return self.runtimes.draw(client, dispatch) / (FLOOD if client in self.attackers else 1.0)

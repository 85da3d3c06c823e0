"""Attacks by a share of the clients, for testing defences: poisoned data, forged updates or flooding."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fedecho.core.clients import NumberSet
from fedecho.core.randomness import numpy_rng, torch_rng
from fedecho.core.ranges import at_least, check_ranges, positive
from fedecho.core.ranges import share as share_of
from fedecho.core.task import Task
from fedecho.core.types import ClientUpdate, Dispatch
from fedecho.simulation.runtimes import ClientRuntimes

Kind = Literal["none", "label_flip", "sign_flip", "scaled", "noise", "logit_backdoor", "flood", "statistics"]
FLOOD = 50.0
"""How many times faster a flooding client reports."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack by a random ``share`` of the clients.

    - ``label_flip`` trains on C - 1 - y.
    - ``sign_flip`` sends -scale Delta, ``scaled`` sends scale Delta.
    - ``noise`` sends a random vector whose norm is scale times Delta's.
    - ``logit_backdoor`` trains only on the label ``target`` and sends scale Delta, so its logits on all of U favour that label.
    - ``flood`` flips labels and answers 50 times as fast.
    - ``statistics`` sends an honest Delta, BatchNorm statistics raised by scale times their change, and scale times FedAC's
      correction.
    """

    kind: Kind = "none"
    share: Annotated[float, share_of(below=True)] = 0.2
    scale: Annotated[float, positive(most=1e30)] = 5.0
    target: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        check_ranges(self, "attack.")

    def attackers(self, num_clients: int, seed: int) -> Set[int]:
        """Draw the attacking clients."""
        if self.kind == "none":
            return NumberSet()
        order = numpy_rng(seed, "attackers").permutation(num_clients)
        return NumberSet(map(int, order[: int(self.share * num_clients + 1e-9)]))

    @property
    def poisons_data(self) -> bool:
        return self.kind in ("label_flip", "logit_backdoor", "flood")

    def sent(self, dispatch: Dispatch, update: ClientUpdate) -> ClientUpdate:
        """Return what an attacker sends in place of its honest update."""
        if self.kind == "sign_flip":
            return replace(update, delta=update.delta * -self.scale)
        if self.kind in ("scaled", "logit_backdoor"):
            return replace(update, delta=update.delta * self.scale)
        if self.kind == "noise":
            return replace(update, delta=self._noise(update.delta, dispatch.seed))
        if self.kind == "statistics":
            base = dispatch.model.weights.buffers
            raised = base + self.scale * (update.buffers - base).abs()  # only upwards: a variance cannot be negative
            correction = None if update.correction is None else update.correction * self.scale
            return replace(update, buffers=raised, correction=correction)
        return update

    def _noise(self, delta: Tensor, seed: int) -> Tensor:
        noise = torch.randn(delta.shape, generator=torch_rng(seed, "attack")).to(delta)
        return noise.mul_(self.scale * torch.linalg.vector_norm(delta) / torch.linalg.vector_norm(noise))


@dataclass(frozen=True)
class PoisonedTask:
    """A task whose attackers get false labels and that otherwise behaves like ``task``. Batches must be (inputs, labels)."""

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
        if name.startswith("__") or name == "task":  # unpickling looks up attributes before ``task`` exists
            raise AttributeError(name)
        return getattr(self.task, name)


@dataclass(frozen=True)
class FloodedRuntimes:
    """Client runtimes under which attackers answer 50 times as fast."""

    runtimes: ClientRuntimes
    attackers: Set[int]

    def class_of(self, client: int) -> str:
        return self.runtimes.class_of(client)

    def draw(self, client: int, dispatch: int) -> float:
        return self.runtimes.draw(client, dispatch) / (FLOOD if client in self.attackers else 1.0)

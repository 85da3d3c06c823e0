"""One job: local training from the model sent to a client. A pure function of client, base version and job seed."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from fedecho.core.layout import BoundNetwork
from fedecho.core.randomness import global_rng, torch_rng
from fedecho.core.task import Batch, Task
from fedecho.core.types import ClientUpdate, Dispatch
from fedecho.learning.descent import bias_correction, step_function, wants_moments, wants_raw_mean
from fedecho.learning.local import LocalTraining


class Steps(Protocol):
    """K training steps on the network's current weights. Jobs share no state."""

    def begin(self, start: Tensor, shift: Tensor | None, num_steps: int) -> None:
        """Start a job of ``num_steps`` from x_s = ``start``. ``shift`` is c - c_i, or None for zero."""
        ...

    def step(self, batch: Batch) -> None: ...

    def raw_mean(self) -> Tensor | None:
        """Return the mean raw gradient as a tensor the caller may change, or None if it is not needed."""
        ...

    def mean_loss(self) -> float: ...


def gradient(task: Task, network: BoundNetwork, batch: Batch, raw: Tensor | None, share: float) -> Tensor:
    """Compute the gradient into ``network.grads`` and add a share of it to ``raw``. Return the loss."""
    network.grads.zero_()
    loss = task.loss(network.module, batch)
    loss.backward()
    if raw is not None:
        raw.add_(network.grads, alpha=share)
    return loss.detach()


@dataclass
class EagerSteps:
    """Steps without CUDA graphs."""

    task: Task
    local: LocalTraining
    network: BoundNetwork
    _count: int = field(default=0, init=False)
    _losses: list[Tensor] = field(default_factory=list, init=False)

    def begin(self, start: Tensor, shift: Tensor | None, num_steps: int) -> None:
        params = self.network.weights.params
        self._count, self._losses, self._share = 0, [], 1 / num_steps
        self._from = (start if self.local.proximal else None, shift)
        self._raw = torch.zeros_like(params) if wants_raw_mean(self.local) else None
        self._moments = (torch.zeros_like(params), torch.zeros_like(params)) if wants_moments(self.local) else ()

    def step(self, batch: Batch) -> None:
        network, local = self.network, self.local
        self._losses.append(gradient(self.task, network, batch, self._raw, self._share))
        self._count += 1
        bias = bias_correction(local, float(self._count)) if self._moments else ()
        step_function(local)(local, network.weights.params, network.grads, *self._from, *self._moments, *bias)

    def raw_mean(self) -> Tensor | None:
        return self._raw

    def mean_loss(self) -> float:
        return float(torch.stack(self._losses).mean())


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: how much free memory may stay at the heap's end, and from which size on a block is mapped."""
TRIM_BYTES, MMAP_BYTES = 1 << 30, 32 << 20
"""Values for these parameters. 32 MB is glibc's maximum."""
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables by which the user configures malloc, which then stays as configured."""


@cache
def keep_heap() -> bool:
    """Keep freed pages mapped for the rest of this process. Return False if malloc is user-configured or not glibc's."""
    if any(name in os.environ for name in USER_SETTINGS):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 (only glibc has this function)
        return bool(libc.mallopt(TRIM_THRESHOLD, TRIM_BYTES)) and bool(libc.mallopt(MMAP_THRESHOLD, MMAP_BYTES))
    except (AttributeError, OSError, TypeError):
        return False


@dataclass(frozen=True)
class Trainer:
    """The task, the settings and the bound network that a worker reuses for all its jobs."""

    task: Task
    local: LocalTraining
    network: BoundNetwork
    steps: Steps | None = None
    """How to run the steps; None means eagerly."""

    def train(self, dispatch: Dispatch, control: Tensor | None = None) -> ClientUpdate:
        """Train locally and return the update. ``control`` is the client's c_i, or None for zero."""
        keep_heap()
        base, network = dispatch.model.weights, self.network
        network.load(base)
        network.module.train()
        num_examples = self.task.num_examples(dispatch.client)
        num_steps = self.local.num_steps(num_examples)
        shift = _shift(dispatch.model.correction, control)
        steps = self.steps or EagerSteps(self.task, self.local, network)
        steps.begin(base.params, None if self.local.correct_once else shift, num_steps)
        augment = torch_rng(dispatch.seed, "augment")
        with global_rng(base.params.device, dispatch.seed, "module"):
            for rows in self._batches(num_examples, num_steps, dispatch.seed):
                steps.step(self.task.batch(dispatch.client, rows, augment))
        if self.local.correct_once and shift is not None:
            network.weights.params.sub_(shift, alpha=self.local.client_lr)
        return ClientUpdate(
            client=dispatch.client,
            base_version=dispatch.model.version,
            delta=network.weights.params - base.params,
            buffers=network.weights.buffers.clone(),
            num_examples=num_examples,
            num_steps=num_steps,
            correction=self._correction(base.params, shift, control, steps.raw_mean(), num_examples),
            metrics={"train_loss": steps.mean_loss()},
        )

    def _batches(self, num_examples: int, num_steps: int, seed: int) -> Iterator[Tensor]:
        """Yield K batches of rows from shuffled passes over the data, including partial last batches."""
        generator, done = torch_rng(seed, "shuffle"), 0
        while done < num_steps:
            order = torch.randperm(num_examples, generator=generator)
            for rows in order.split(self.local.batch_size)[: num_steps - done]:
                done += 1
                yield rows

    def _correction(
        self, start: Tensor, shift: Tensor | None, control: Tensor | None, raw: Tensor | None, num_examples: int
    ) -> Tensor | None:
        """Return dc_i = c_i' - c_i.

        c_i' is ``raw`` where AdamW's gradient is corrected, otherwise c_i - c + (x_s - y) / (K lr). With ``correct_once``, E
        passes over the data take the place of K steps.
        """
        if not self.local.control_variates:
            return None
        if raw is not None:
            return raw if control is None else raw.sub_(control)
        moved = (start - self.network.weights.params) / (self.local.num_corrected(num_examples) * self.local.client_lr)
        # c_i' - c_i = -c + moved, and c = shift + c_i.
        moved = moved if shift is None else moved.sub_(shift)
        return moved if control is None else moved.sub_(control)


def _shift(correction: Tensor | None, control: Tensor | None) -> Tensor | None:
    """Return c - c_i, with None for zero."""
    if control is None:
        return correction
    return -control if correction is None else correction - control

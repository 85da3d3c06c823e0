"""One job: a client trains from the model it was sent. A pure function of (client, model, seed, control variate)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.core.layout import BoundNetwork
from fedecho.core.rng import global_rng, torch_rng
from fedecho.core.task import Task
from fedecho.core.types import ClientUpdate, Dispatch
from fedecho.learning.heap import keep_heap
from fedecho.learning.local import LocalTraining
from fedecho.learning.steps import EagerSteps, Steps


@dataclass(frozen=True)
class Trainer:
    """The task, the settings and one bound network to train in: a worker keeps it from job to job."""

    task: Task
    local: LocalTraining
    network: BoundNetwork
    steps: Steps | None = None
    """How its steps are made; None is eager."""

    def train(self, dispatch: Dispatch, control: Tensor | None = None) -> ClientUpdate:
        """Local training. ``control`` is the client's c_i; None is zero."""
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
        """Shuffled passes, partial last batches kept, cut after K steps."""
        generator, done = torch_rng(seed, "shuffle"), 0
        while done < num_steps:
            order = torch.randperm(num_examples, generator=generator)
            for rows in order.split(self.local.batch_size)[: num_steps - done]:
                done += 1
                yield rows

    def _correction(
        self, start: Tensor, shift: Tensor | None, control: Tensor | None, raw: Tensor | None, num_examples: int
    ) -> Tensor | None:
        """dc_i = c_i' - c_i, with c_i' = c_i - c + (x_s - y) / (K lr), or ``raw`` where AdamW's gradient is corrected.

        Corrected once, E passes over the data take the place of K steps.
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
    """c - c_i, with None for zero."""
    if control is None:
        return correction
    return -control if correction is None else correction - control

"""One job: a client trains from the model it was sent. A pure function of (client, model, seed, control variate)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.core.layout import BoundNetwork
from fedecho.core.rng import global_rng, torch_rng
from fedecho.core.task import Task
from fedecho.core.types import ClientUpdate, Dispatch
from fedecho.learning.local import LocalTraining


@dataclass(frozen=True)
class Trainer:
    """The task, the settings and one bound network to train in: a worker keeps it from job to job."""

    task: Task
    local: LocalTraining
    network: BoundNetwork

    def train(self, dispatch: Dispatch, control: Tensor | None = None) -> ClientUpdate:
        """Local training. ``control`` is the client's c_i; None is zero."""
        base, network = dispatch.model.weights, self.network
        network.load(base)
        network.module.train()
        num_examples = self.task.num_examples(dispatch.client)
        num_steps = self.local.num_steps(num_examples)
        shift = _shift(dispatch.model.correction, control)
        step = self._sgd(base.params, shift) if self.local.optimizer == "sgd" else self._adamw(base.params, shift)
        raw = torch.zeros_like(network.grads) if self._wants_raw_mean else None
        with global_rng(base.params.device, dispatch.seed, "module"):
            losses = self._steps(dispatch, num_examples, num_steps, step, raw)
        return ClientUpdate(
            client=dispatch.client,
            base_version=dispatch.model.version,
            delta=network.weights.params - base.params,
            buffers=network.weights.buffers.clone(),
            num_examples=num_examples,
            num_steps=num_steps,
            correction=self._correction(base.params, shift, control, raw, num_steps),
            metrics={"train_loss": float(torch.stack(losses).mean())},
        )

    def _steps(
        self, dispatch: Dispatch, num_examples: int, num_steps: int, step: Callable[[], None], raw: Tensor | None
    ) -> list[Tensor]:
        """K steps; their losses. ``raw`` takes up the mean gradient."""
        network, augment, losses = self.network, torch_rng(dispatch.seed, "augment"), []
        network.grads.zero_()
        for rows in self._batches(num_examples, num_steps, dispatch.seed):
            loss = self.task.loss(network.module, self.task.batch(dispatch.client, rows, augment))
            loss.backward()
            if raw is not None:
                raw.add_(network.grads, alpha=1 / num_steps)
            step()
            network.grads.zero_()
            losses.append(loss.detach())
        return losses

    def _batches(self, num_examples: int, num_steps: int, seed: int) -> Iterator[Tensor]:
        """Shuffled passes, partial last batches kept, cut after K steps."""
        generator, done = torch_rng(seed, "shuffle"), 0
        while done < num_steps:
            order = torch.randperm(num_examples, generator=generator)
            for rows in order.split(self.local.batch_size)[: num_steps - done]:
                done += 1
                yield rows

    def _gradient(self, start: Tensor, shift: Tensor | None) -> Tensor:
        """The raw gradient with the proximal term and the control variates' correction, in place."""
        grads, params = self.network.grads, self.network.weights.params
        if self.local.proximal:
            grads.add_(params, alpha=self.local.proximal).sub_(start, alpha=self.local.proximal)
        return grads if shift is None else grads.add_(shift)

    def _sgd(self, start: Tensor, shift: Tensor | None) -> Callable[[], None]:
        """y -= lr (g + wd y + prox (y - x_s) + c - c_i)."""
        params, local = self.network.weights.params, self.local

        def step() -> None:
            grads = self._gradient(start, shift)
            if local.weight_decay:
                grads.add_(params, alpha=local.weight_decay)
            params.sub_(grads, alpha=local.client_lr)

        return step

    def _adamw(self, start: Tensor, shift: Tensor | None) -> Callable[[], None]:
        """AdamW with decoupled weight decay; moments start at zero with the job."""
        params, local, count = self.network.weights.params, self.local, 0
        first, second = torch.zeros_like(params), torch.zeros_like(params)

        def step() -> None:
            nonlocal count
            count += 1
            grads = self._gradient(start, shift)
            params.mul_(1 - local.client_lr * local.weight_decay)
            first.lerp_(grads, 1 - local.beta1)
            second.mul_(local.beta2).addcmul_(grads, grads, value=1 - local.beta2)
            scale = (second.sqrt() / (1 - local.beta2**count) ** 0.5).add_(local.eps)
            params.addcdiv_(first, scale, value=-local.client_lr / (1 - local.beta1**count))

        return step

    @property
    def _wants_raw_mean(self) -> bool:
        return self.local.control_variates and self.local.optimizer == "adamw"

    def _correction(
        self, start: Tensor, shift: Tensor | None, control: Tensor | None, raw: Tensor | None, num_steps: int
    ) -> Tensor | None:
        """dc_i = c_i' - c_i: SGD has c_i' = c_i - c + (x_s - y) / (K lr); AdamW takes the mean raw gradient for c_i'."""
        if not self.local.control_variates:
            return None
        if raw is not None:
            return raw if control is None else raw.sub_(control)
        moved = (start - self.network.weights.params) / (num_steps * self.local.client_lr)
        # c_i' - c_i = -c + moved, and c = shift + c_i.
        moved = moved if shift is None else moved.sub_(shift)
        return moved if control is None else moved.sub_(control)


def _shift(correction: Tensor | None, control: Tensor | None) -> Tensor | None:
    """c - c_i, with None for zero."""
    if control is None:
        return correction
    return -control if correction is None else correction - control

"""Trains several clients at once on one GPU, each on its own stream with its SGD step captured as a CUDA graph."""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import torch
from torch import Tensor

from fedecho.core.layout import Layout
from fedecho.core.randomness import torch_rng
from fedecho.core.types import ClientUpdate, Weights
from fedecho.executors.executor import Job
from fedecho.gpu.capture import Capturable, DeviceWeights, Forward, Precision
from fedecho.gpu.streams import WARM_UPS, StreamEvent, hand_over, pinned_zeros, record_event, stream_on
from fedecho.learning.local import LocalTraining


@dataclass(frozen=True)
class Plan:
    """What all slots share: the task on the device, the settings and the compiled functions."""

    task: Capturable
    num_examples: list[int]
    local: LocalTraining
    layout: Layout
    resident: tuple[Tensor, ...]
    batch: "BatchFunction"
    forward: Forward
    loss: "LossFunction"
    update: Callable[..., None]
    """Made by ``compiled_update``."""
    precision: Precision
    device: torch.device

    @property
    def max_steps(self) -> int:
        return max(self.local.num_steps(num) for num in self.num_examples)


@dataclass(frozen=True)
class Running:
    """A job in progress on a slot; ``done`` is recorded after its last kernel."""

    job: Job
    num_steps: int
    delta: Tensor
    buffers: Tensor
    correction: Tensor | None
    loss: Tensor
    done: StreamEvent


class Slot:
    """Weights, inputs and a graph at fixed addresses. A job uploads its batch numbers and replays the graph K times."""

    def __init__(self, plan: Plan) -> None:
        device, size = plan.device, plan.local.batch_size
        self.plan = plan
        self.stream = stream_on(device)
        self.weights = DeviceWeights(plan.layout, device, plan.precision.dtype)
        capacity = plan.max_steps + WARM_UPS
        self.numbers = torch.zeros(capacity, 2, size, dtype=torch.long, device=device)
        self.row_weights = torch.full((capacity, size), 1.0 / size, device=device)
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        self.start = torch.zeros_like(self.weights.params) if plan.local.proximal else None
        self.shift = torch.zeros_like(self.weights.params) if plan.local.control_variates else None
        self.graph = self.stream.capture(self._step)

    def _step(self) -> None:
        """Run one SGD step on the batch at the cursor."""
        plan, weights = self.plan, self.weights
        images, labels, row_weight = plan.batch(plan.resident, self.numbers, self.row_weights, self.cursor)
        logits = plan.forward(weights.named, weights.named_buffers, images, row_weight)
        loss = plan.loss(logits, labels, row_weight)
        matrix_grads, vector_grad = weights.gradients(loss)
        # Matrix by matrix: concatenating the gradients first would cost as much as the step itself.
        for (span, master, low), grad in zip(weights.matrices, matrix_grads, strict=True):
            plan.update(master, low, grad, None, *self._extras(span))
        vector = weights.masters[1]
        plan.update(vector, vector, vector_grad, None, *self._extras(slice(weights.num_matrix, None)))
        self.loss.add_(loss.detach())
        self.cursor.add_(1)

    def _extras(self, part: slice) -> tuple[Tensor | None, Tensor | None]:
        """Return x_s and c - c_i if the method uses them in every step."""
        shift = None if self.plan.local.correct_once else self.shift
        return None if self.start is None else self.start[part], None if shift is None else shift[part]

    def begin(self, job: Job, ready: StreamEvent) -> Running:
        """Queue the whole job; returns at once."""
        base, local = job.dispatch.model.weights, self.plan.local
        num_steps = local.num_steps(self.plan.num_examples[job.dispatch.client])
        numbers, row_weights = self._numbers(job, num_steps)
        with self.stream.queue():
            self.stream.wait(ready)
            self.weights.load(base)
            self.numbers[:num_steps].copy_(numbers, non_blocking=True)
            self.row_weights[:num_steps].copy_(row_weights, non_blocking=True)
            self.cursor.zero_()
            self.loss.zero_()
            if self.start is not None:
                self.start.copy_(base.params)
            if self.shift is not None:
                self._load_shift(job)
            for _ in range(num_steps):
                self.graph.replay()
            return self._finished(job, base, num_steps)

    def _finished(self, job: Job, base: Weights, num_steps: int) -> Running:
        delta, local = self.weights.params - base.params, self.plan.local
        correction = None
        if self.shift is not None:
            if local.correct_once:
                delta.sub_(self.shift, alpha=local.client_lr)
            # dc_i = (x_s - y) / (K lr) - c, and c = shift + c_i.
            num_corrected = local.num_corrected(self.plan.num_examples[job.dispatch.client])
            correction = delta.mul(-1.0 / (num_corrected * local.client_lr)).sub_(self.shift)
            if job.control is not None:
                correction.sub_(job.control)
        loss = self.loss / num_steps
        return Running(job, num_steps, delta, self.weights.buffers.clone(), correction, loss, self.stream.record())

    def _load_shift(self, job: Job) -> None:
        assert self.shift is not None  # noqa: S101 (for the type checker)
        correction = job.dispatch.model.correction
        self.shift.zero_() if correction is None else self.shift.copy_(correction)
        if job.control is not None:
            self.shift.sub_(job.control)

    def _numbers(self, job: Job, num_steps: int) -> tuple[Tensor, Tensor]:
        """Draw rows and augmentation for every step exactly as the plain trainer does; short batches are padded with weight 0."""
        task, size = self.plan.task, self.plan.local.batch_size
        client_rows, seed = task.rows_of(job.dispatch.client), job.dispatch.seed
        shuffle, augment = torch_rng(seed, "shuffle"), torch_rng(seed, "augment")
        numbers = pinned_zeros(num_steps, 2, size, dtype=torch.long, device=self.plan.device)
        weights = pinned_zeros(num_steps, size, dtype=torch.float32, device=self.plan.device)
        for step, rows in enumerate(islice(_passes(len(client_rows), size, shuffle), num_steps)):
            count = len(rows)
            numbers[step, 0, :count] = client_rows[rows]
            numbers[step, 1, :count] = task.draw(count, augment)
            weights[step, :count] = 1.0 / count
        return numbers, weights

    def update_of(self, running: Running) -> ClientUpdate:
        """Wait for the job and return its update."""
        running.done.synchronize()
        for tensor in (running.delta, running.buffers, running.correction):
            if tensor is not None:
                hand_over(tensor)
        dispatch = running.job.dispatch
        return ClientUpdate(
            client=dispatch.client,
            base_version=dispatch.model.version,
            delta=running.delta,
            buffers=running.buffers,
            num_examples=self.plan.num_examples[dispatch.client],
            num_steps=running.num_steps,
            correction=running.correction,
            metrics={"train_loss": float(running.loss)},
        )


def _passes(num_examples: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches from endless shuffled passes over a client's rows."""
    while True:
        yield from torch.randperm(num_examples, generator=generator).split(size)


BatchFunction = Callable[[tuple[Tensor, ...], Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch_under_cursor(task: Capturable, precision: Precision) -> BatchFunction:
    """Compile (resident data, numbers and row weights of all steps, cursor) -> (images, labels, row weights)."""
    pick = task.pick

    def batch(
        resident: tuple[Tensor, ...], numbers: Tensor, row_weights: Tensor, cursor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows_and_draws = numbers.index_select(0, cursor)[0]
        images, labels = pick(resident, rows_and_draws[0], rows_and_draws[1])
        return images.to(precision.dtype), labels, row_weights.index_select(0, cursor)[0]

    return precision.compile(batch)


def weighted_loss(task: Capturable, precision: Precision) -> LossFunction:
    """Compile the mean loss over the rows with non-zero weight."""
    row_losses = task.row_losses

    def loss(logits: Tensor, labels: Tensor, row_weight: Tensor) -> Tensor:
        return (row_losses(logits, labels) * row_weight).sum()

    return precision.compile(loss)


DEPTH = 2
"""Jobs a slot holds at once, so that it keeps training while the host waits for a result or distils."""


class CudaExecutor:
    """Starts jobs in the order they are due, each on the slot with the least queued work."""

    def __init__(self, plan: Plan, *, num_slots: int = 6, wanted: Set[int] | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"workers must be at least 1, got {num_slots}")
        self._wanted = wanted
        self._device = plan.device
        self.slots = [Slot(plan) for _ in range(num_slots)]
        self._jobs: dict[int, tuple[Job, StreamEvent]] = {}
        self._pending: list[tuple[float, int]] = []
        self._running: dict[int, tuple[int, Running]] = {}

    def submit(self, job: Job, due: float) -> None:
        number = job.dispatch.number
        self._jobs[number] = (job, record_event(self._device))
        if self._wanted is None or number in self._wanted:
            heappush(self._pending, (due, number))
            self._pump()

    def result(self, number: int) -> ClientUpdate:
        if number in self._jobs:
            self._start(number)
        slot, running = self._running.pop(number)
        update = self.slots[slot].update_of(running)
        self._pump()
        return update

    def cancel(self, number: int) -> None:
        if self._jobs.pop(number, None) is None:
            self._running.pop(number, None)

    def close(self) -> None:
        for _, running in self._running.values():
            running.done.synchronize()
        self.slots.clear()
        self._jobs.clear()
        self._running.clear()

    def _pump(self) -> None:
        """Start the next due jobs while a slot has capacity. A finished result that is not due yet uses none."""
        loads = self._loads()
        while self._pending and min(len(load) for load in loads) < DEPTH:
            number = heappop(self._pending)[1]
            if number in self._jobs:
                self._start(number)
                loads = self._loads()

    def _start(self, number: int) -> None:
        job, ready = self._jobs.pop(number)
        loads = self._loads()
        slot = min(range(len(loads)), key=lambda index: (len(loads[index]), sum(loads[index])))
        self._running[number] = (slot, self.slots[slot].begin(job, ready))

    def _loads(self) -> list[list[int]]:
        """Return, for each slot, the numbers of steps of its unfinished jobs."""
        loads: list[list[int]] = [[] for _ in self.slots]
        for slot, running in self._running.values():
            if not running.done.query():
                loads[slot].append(running.num_steps)
        return loads

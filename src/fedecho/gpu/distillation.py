"""The student on a GPU: inference and the distillation step as CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedecho.core.types import Weights
from fedecho.distill.distiller import Adam, Distiller
from fedecho.distill.loss import clip_factor, distillation_loss
from fedecho.distill.student import Student, Teacher
from fedecho.gpu.capture import Capturable, DeviceWeights, Forward, Precision
from fedecho.gpu.streams import WARM_UPS, Graph, stream_on


@dataclass(frozen=True)
class Forwards:
    """The network as functions: BatchNorm in train mode, in eval mode, and a faster eval mode without gradients."""

    train: Forward
    evaluate: Forward
    infer: Forward


class DeviceStudent:
    """The server's network at fixed addresses on the device."""

    def __init__(
        self,
        student: Student,
        task: Capturable,
        forwards: Forwards,
        precision: Precision,
        size: int,
    ) -> None:
        device = student.device
        self.layout = student.network.layout
        self.task, self.forwards, self.precision = task, forwards, precision
        self.weights = DeviceWeights(self.layout, device, precision.dtype)
        self.stream = stream_on(device, high_priority=True)
        self.full = torch.full((size,), 1.0 / size, device=device)
        self.rows = torch.arange(student.num_unlabeled, device=device)
        self.chunk = student.chunk

    def infer_all(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([self._logits(part) for part in self.rows.split(self.chunk)])

    def _logits(self, rows: Tensor) -> Tensor:
        images = self.task.unlabeled_images(rows)
        return self.forwards.infer(self.weights.named, self.weights.named_buffers, images, self.full)


Update = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


@cache
def compiled_distillation_step(distiller: Distiller, precision: Precision) -> Update:
    """Compile ``Distiller.step`` on a clipped gradient, with the step count on the device; it makes one pass over memory."""
    beta1, beta2, eps, distill_lr = distiller.beta1, distiller.beta2, distiller.eps, distiller.distill_lr

    def descend(
        params: Tensor, low: Tensor, grad: Tensor, factor: Tensor, first: Tensor, second: Tensor, count: Tensor
    ) -> None:
        params.sub_(grad.float() * factor * distill_lr)
        if low is not params:
            low.copy_(params)

    def update(params: Tensor, low: Tensor, grad: Tensor, factor: Tensor, first: Tensor, second: Tensor, count: Tensor) -> None:
        clipped = grad.float() * factor
        first.lerp_(clipped, 1 - beta1)
        second.mul_(beta2).addcmul_(clipped, clipped, value=1 - beta2)
        scale = (second / (1 - beta2**count)).sqrt() + eps
        params.sub_(first / scale * (distill_lr / (1 - beta1**count)))
        if low is not params:
            low.copy_(params)

    return precision.compile(update if distiller.optimizer == "adam" else descend, dynamic=True)


class InferenceGraph:
    """Computes the logits of the loaded weights on all of U."""

    def __init__(self, net: DeviceStudent, output: Tensor) -> None:
        self.net, self.output = net, output
        self.graph = net.stream.capture(self._infer)

    def _infer(self) -> None:
        self.output.copy_(self.net.infer_all())

    def run(self) -> Tensor:
        self.graph.replay()
        return self.output.clone()


class DistillationGraph:
    """One distillation step on the batch at the cursor: gradient, clipping and optimizer, all on the device."""

    def __init__(self, device_student: DeviceStudent, distiller: Distiller, num_steps: int, teacher: Tensor) -> None:
        weights = device_student.weights
        self.net, self.distiller = device_student, distiller
        device = weights.params.device
        self.teacher = torch.zeros_like(teacher)
        capacity = num_steps + WARM_UPS
        self.rows = torch.zeros(capacity, distiller.batch_size, dtype=torch.long, device=device)
        self.seen = torch.zeros(capacity, 5, device=device)
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)
        self.count = torch.zeros((), device=device)
        self.first, self.second = torch.zeros_like(weights.params), torch.zeros_like(weights.params)
        self.update = compiled_distillation_step(distiller, device_student.precision)
        self.graph = device_student.stream.capture(self._step)

    def _step(self) -> None:
        distiller, net, weights = self.distiller, self.net, self.net.weights
        rows = self.rows.index_select(0, self.cursor)[0]
        forward = net.forwards.train if distiller.batch_norm == "train" else net.forwards.evaluate
        logits = forward(weights.named, weights.named_buffers, net.task.unlabeled_images(rows), net.full)
        parts = distillation_loss(logits, self.teacher[rows], distiller.alpha_min, distiller.alpha_max)
        matrix_grads, vector_grad = weights.gradients(parts.loss)
        # In fp32 without an fp32 copy, and matrix by matrix, without concatenating the gradients first.
        norms = [*torch._foreach_norm(matrix_grads, dtype=torch.float32), torch.linalg.vector_norm(vector_grad)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self.count.add_(1)
        factor, vectors = clip_factor(norm, distiller.clip_norm), weights.masters[1]
        segments = [*weights.matrices, (slice(weights.num_matrix, None), vectors, vectors)]
        for (part, master, low), grad in zip(segments, [*matrix_grads, vector_grad], strict=True):
            self.update(master, low, grad, factor, self.first[part], self.second[part], self.count)
        clipped = (norm > distiller.clip_norm).float()
        seen = torch.stack([parts.loss.detach(), parts.entropy, parts.soft_weight, norm, clipped])
        self.seen.index_copy_(0, self.cursor, seen[None])
        self.cursor.add_(1)

    def run(self, adam: Adam, weights: Weights, teacher: Tensor, batches: list[Tensor]) -> tuple[Adam, Weights, Tensor]:
        self.teacher.copy_(teacher)
        self.rows[: len(batches)].copy_(torch.stack(batches))
        self.first.copy_(adam.first)
        self.second.copy_(adam.second)
        self.count.fill_(adam.num_steps)
        self.cursor.zero_()
        self.net.weights.load(weights)
        for _ in batches:
            self.graph.replay()
        adam.first.copy_(self.first)
        adam.second.copy_(self.second)
        taught = Weights(self.net.weights.params.clone(), self.net.weights.buffers.clone())
        return replace(adam, num_steps=adam.num_steps + len(batches)), taught, self.seen[: len(batches)].clone()


@dataclass(frozen=True)
class CapturedStudent(Student):
    """A student whose inference and distillation are graphs, captured at first use."""

    device_student: DeviceStudent | None = None

    def prepared(self, distiller: Distiller) -> "CapturedStudent":
        """Capture the graphs in advance, so that no version waits for them."""
        self._infer_graph()
        if self.num_unlabeled % distiller.batch_size == 0 and (num_steps := distiller.num_steps(self.num_unlabeled)):
            self._teach_graph(distiller, num_steps)
        return self

    def infer(self, weights: Weights) -> Tensor:
        self._net.weights.load(weights)
        return self._infer_graph().run()

    def predict(self, weights: Weights, rows: Tensor) -> Tensor:
        return self.infer(weights)[rows]  # the graph for all of U exists; a second one would cost memory and a capture

    def teach(
        self, distiller: Distiller, adam: Adam, weights: Weights, teacher: Teacher, batches: list[Tensor]
    ) -> tuple[Adam, Weights, Tensor]:
        if not isinstance(teacher, Tensor) or any(len(rows) != distiller.batch_size for rows in batches):
            return super().teach(distiller, adam, weights, teacher, batches)  # a partial batch does not fit the graph
        return self._teach_graph(distiller, len(batches)).run(adam, weights, teacher, batches)

    def _infer_graph(self) -> InferenceGraph:
        if "infer" not in self._graphs:
            self._graphs["infer"] = InferenceGraph(self._net, self._no_logits())
        graph: InferenceGraph = self._graphs["infer"]
        return graph

    def _teach_graph(self, distiller: Distiller, num_steps: int) -> DistillationGraph:
        """Return the graph for these settings, which are compiled into it."""
        settings = (distiller, num_steps)
        if settings not in self._graphs:
            self._graphs[settings] = DistillationGraph(self._net, distiller, num_steps, self._no_logits())
        graph: DistillationGraph = self._graphs[settings]
        return graph

    def _no_logits(self) -> Tensor:
        return torch.zeros(self.num_unlabeled, self.num_classes(), device=self.device)

    @property
    def _net(self) -> DeviceStudent:
        if self.device_student is None:
            raise ValueError("a captured student needs its device weights")
        return self.device_student

    @property
    def _graphs(self) -> dict[Any, Any]:
        graphs: dict[Any, Any] = self.__dict__.setdefault("_captured", {})
        return graphs


class DeviceModule(nn.Module):
    """A device student's weights as a module that a task can evaluate, with one graph per batch shape."""

    def __init__(self, net: DeviceStudent) -> None:
        super().__init__()
        self.net = net
        self._graphs: dict[tuple[int, ...], tuple[Tensor, Tensor, Graph]] = {}

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape) not in self._graphs:
            self._graphs[tuple(images.shape)] = self._captured(images)
        held, logits, graph = self._graphs[tuple(images.shape)]
        held.copy_(images)
        graph.replay()
        return logits.clone()

    def _captured(self, images: Tensor) -> tuple[Tensor, Tensor, Graph]:
        held, net = images.clone(), self.net

        def evaluate() -> None:
            with torch.no_grad():
                logits.copy_(net.forwards.infer(net.weights.named, net.weights.named_buffers, held, net.full))

        with torch.no_grad():
            logits = net.forwards.infer(net.weights.named, net.weights.named_buffers, held, net.full)
        return held, logits, net.stream.capture(evaluate)

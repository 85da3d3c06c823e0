"""Measure what each optimization gains on a GPU, in images per second of ResNet-18 training at batch 50.

From eager to compiled streams, and then with FedEcho's server work in turn with the clients or overlapped with them.

    python -m benchmarks.gpu_steps [--seconds 2] [--slots 6] [--kernels sums,maps] [--json FILE]

``--kernels`` says which of BatchNorm's own kernels the last rows have. Needs CUDA; the images are random bytes, which changes no
time.
"""

import argparse
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.arguments import at_least_one, listed, need_gpu, positive
from benchmarks.kept import keep
from fedecho import Experiment, load
from fedecho.core.types import Dispatch, GlobalModel
from fedecho.distill.distiller import Adam
from fedecho.executors.executor import Job
from fedecho.gpu import channel_ops
from fedecho.gpu.capture import Precision
from fedecho.gpu.executor import CudaExecutor
from fedecho.gpu.streams import record_event
from fedecho.learning.trainer import Trainer
from fedecho.runs.on_gpu import GpuParts, forget_compiled, gpu_settings, select_gpu
from fedecho.tasks.partition import Parts, as_parts
from fedecho.tasks.vision.cifar import CifarTask
from fedecho.tasks.vision.images import Images

CLIENT_IMAGES, NUM_CLIENTS, EAGER_STEPS = 1000, 50, 20
BUFFER_SIZE = 5
"""Arrivals, each with its inference on U, for one distillation."""


def noise(num: int) -> Images:
    rng = np.random.default_rng(0)
    return Images(rng.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, num))


@dataclass(frozen=True, kw_only=True)
class NoiseTask(CifarTask):
    """A CIFAR task whose images are noise, the same number for each client."""

    num_clients: int = NUM_CLIENTS

    @cached_property
    def _sets(self) -> tuple[Images, Images]:
        return noise(CLIENT_IMAGES * NUM_CLIENTS), noise(10)

    @cached_property
    def _parts(self) -> Parts:
        return as_parts(np.arange(CLIENT_IMAGES * NUM_CLIENTS).reshape(NUM_CLIENTS, CLIENT_IMAGES))

    @cached_property
    def _unlabeled_images(self) -> Images:
        return noise(self.num_unlabeled)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    step: str
    images_per_s: float


def rate(work: Callable[[], int], at_least_s: float) -> float:
    """Images per second of ``work``, which returns how many it trained on."""
    work()
    torch.cuda.synchronize()
    began, images = time.perf_counter(), 0
    while time.perf_counter() - began < at_least_s:
        images += work()
        torch.cuda.synchronize()
    return images / (time.perf_counter() - began)


def model_of(parts: GpuParts) -> GlobalModel:
    return GlobalModel(0, parts.network.layout.pack(parts.network.module))


def eager(parts: GpuParts) -> Callable[[], int]:
    """The plain trainer, as it runs on a CPU."""
    local = replace(parts.experiment.local_training, num_local_steps=EAGER_STEPS)
    trainer, model = Trainer(parts.task, local, parts.network), model_of(parts)

    def work() -> int:
        trainer.train(Dispatch(0, 0, model, 0))
        return EAGER_STEPS * local.batch_size

    return work


def captured(parts: GpuParts, num_slots: int) -> Callable[[], int]:
    """A job on each stream."""
    executor, model = parts.executor(num_slots, None), model_of(parts)
    assert isinstance(executor, CudaExecutor)
    epochs = parts.experiment.local_training.epochs

    def work() -> int:
        ready = record_event(parts.device)
        for number, slot in enumerate(executor.slots):
            slot.begin(Job(Dispatch(number, number, model, number)), ready)
        return num_slots * CLIENT_IMAGES * epochs

    return work


def with_server(parts: GpuParts, clients: Callable[[], int], *, overlapped: bool) -> Callable[[], int]:
    """The clients beside what FedEcho's server does for as many arrivals."""
    student, distiller = parts.student(), parts.experiment.algorithm.distiller  # type: ignore[attr-defined]
    model, num = model_of(parts), parts.task.num_unlabeled
    batches = list(torch.arange(num, device=parts.device).split(distiller.batch_size))
    adam = Adam.fresh(model.weights.params)

    def work() -> int:
        images = clients()
        if not overlapped:
            torch.cuda.synchronize()
        for _ in range(max(1, images // (2 * CLIENT_IMAGES * BUFFER_SIZE))):
            for _ in range(BUFFER_SIZE):
                teacher = student.infer(model.weights)
            student.teach(distiller, adam, model.weights, teacher, batches)
        return images

    return work


@contextmanager
def kernels(chosen: Collection[str]) -> Iterator[None]:
    """Only these; what was compiled with others is forgotten."""
    kept = {name: least for name, least in channel_ops.KERNELS.items() if name in chosen}
    forget_compiled()
    with patch.dict(channel_ops.KERNELS, kept, clear=True):
        yield


def table(experiment: Experiment, num_slots: int, seconds: float, chosen: Collection[str]) -> list[Row]:
    """From the plainest to what ``--executor cuda`` does."""
    device, rows = select_gpu(), []

    def measured(step: str, work: Callable[[], int]) -> None:
        rows.append(Row(step, rate(work, seconds)))
        print(f"{rows[-1].step:<75} {rows[-1].images_per_s:>8,.0f} images/s", flush=True)

    with kernels(()), gpu_settings(plain := Precision(torch.float32, compiled=False), device):
        measured("eager, fp32", eager(GpuParts(experiment, plain, device)))
    for precision, name, used in (
        (Precision(compiled=False), "graph, bf16", ()),
        (Precision(), "graph, bf16, compiled", ()),
        (Precision(), f"the same, BatchNorm's own kernels ({' and '.join(chosen)})", chosen),
    ):
        with kernels(used), gpu_settings(precision, device):
            parts = GpuParts(experiment, precision, device, say=print)
            measured(f"{name}, 1 stream", captured(parts, 1))
            clients = captured(parts, num_slots)
            measured(f"{name}, {num_slots} streams", clients)
            if used:
                measured("the same, FedEcho's server in turn", with_server(parts, clients, overlapped=False))
                measured("the same, FedEcho's server overlapped", with_server(parts, clients, overlapped=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=positive, default=2.0)
    parser.add_argument("--slots", type=at_least_one, default=6)
    parser.add_argument("--kernels", type=listed(str, channel_ops.KERNELS), default=list(channel_ops.KERNELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu(parser)
    select_gpu()
    experiment = replace(load("cifar10", algorithm="fedecho"), task=NoiseTask())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-18, batch 50")
    rows = table(experiment, options.slots, options.seconds, options.kernels)
    keep(options.json, rows)


if __name__ == "__main__":
    main()

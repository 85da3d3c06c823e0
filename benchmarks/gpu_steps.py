"""What each step brought on a GPU: images per second of ResNet-18 training at batch 50, from eager to captured, compiled streams.

    python -m benchmarks.gpu_steps [--seconds 2] [--only compiled]

Needs CUDA; the images are random bytes, which changes no time.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fedecho.core.capture import Precision, forward_of
from fedecho.core.lanes import mark_here
from fedecho.core.layout import Layout
from fedecho.core.types import Dispatch, GlobalModel
from fedecho.learning.local import LocalTraining
from fedecho.learning.trainer import Trainer
from fedecho.models.row_norm import with_row_norm
from fedecho.simulation.executors.captured import Plan, Slot, batch_under_cursor, sgd_update, weighted_loss
from fedecho.simulation.executors.executor import Job
from fedecho.tasks.cifar import CifarTask

CLIENT_IMAGES, NUM_CLIENTS = 1000, 16


def random_task() -> CifarTask:
    """A CIFAR task whose images are noise on the device."""
    task = CifarTask(num_clients=NUM_CLIENTS, device="cuda")
    num = CLIENT_IMAGES * NUM_CLIENTS
    task.__dict__["_padded"] = torch.randint(256, (num, 40, 40, 3), dtype=torch.uint8, device="cuda")
    task.__dict__["_labels"] = torch.randint(10, (num,), device="cuda")
    task.__dict__["_parts"] = list(torch.arange(num).split(CLIENT_IMAGES))
    return task


def plan_of(task: CifarTask, local: LocalTraining, precision: Precision) -> Plan:
    module = with_row_norm(task.network(0)).to("cuda").train()
    return Plan(
        task=task,
        num_examples=[CLIENT_IMAGES] * NUM_CLIENTS,
        local=local,
        layout=Layout.of(task.network(0)),
        resident=task.resident(),
        batch=batch_under_cursor(task, precision),
        forward=forward_of(module, precision),
        loss=weighted_loss(task, precision),
        update=sgd_update(local, precision),
        precision=precision,
        device=torch.device("cuda"),
    )


def rate(work: Callable[[], int], at_least_s: float) -> float:
    """Images per second of ``work``, which returns how many it trained on."""
    work()
    torch.cuda.synchronize()
    began, images = time.perf_counter(), 0
    while time.perf_counter() - began < at_least_s:
        images += work()
        torch.cuda.synchronize()
    return images / (time.perf_counter() - began)


def eager(task: CifarTask, local: LocalTraining) -> Callable[[], int]:
    module = task.network(0)
    layout = Layout.of(module)
    network = layout.bind(module, "cuda")
    trainer = Trainer(task, replace(local, num_local_steps=20), network)
    model = GlobalModel(0, network.weights.clone())

    def work() -> int:
        trainer.train(Dispatch(0, 0, model, 0))
        return 20 * local.batch_size

    return work


def streams(plan: Plan, num_slots: int) -> Callable[[], int]:
    slots = [Slot(plan) for _ in range(num_slots)]
    weights = plan.layout.pack(plan.task.network(0))  # type: ignore[attr-defined]
    model = GlobalModel(0, replace(weights, params=weights.params.cuda(), buffers=weights.buffers.cuda()))

    def work() -> int:
        ready = mark_here(plan.device)
        for number, slot in enumerate(slots):
            slot.begin(Job(Dispatch(number, number, model, number)), ready)
        return num_slots * CLIENT_IMAGES * plan.local.epochs

    return work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--slots", default="1,4,8,12")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    task, local = random_task(), LocalTraining(client_lr=0.03, weight_decay=1e-4, epochs=2, batch_size=50)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-18, batch 50")
    if not options.only or options.only == "eager":
        print(f"eager fp32: {rate(eager(task, local), options.seconds):,.0f} images/s", flush=True)
    for compiled in (False, True):
        if options.only and options.only != ("compiled" if compiled else "graph"):
            continue
        began = time.perf_counter()
        plan = plan_of(task, local, Precision(compiled=compiled))
        for num_slots in map(int, options.slots.split(",")):
            speed = rate(streams(plan, num_slots), options.seconds)
            spent = time.perf_counter() - began
            label = "compiled, " if compiled else ""
            print(f"graph, {label}bf16, {num_slots} streams: {speed:,.0f} images/s ({spent:.0f} s so far)", flush=True)


if __name__ == "__main__":
    main()

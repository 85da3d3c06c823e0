"""Measure the simulator's overhead against a bare training loop with the same SGD steps.

    python -m benchmarks.overhead            all three tables
    python -m benchmarks.overhead serial     only one of: serial, pool, bank

Runs alternate (bare, ours, bare, ours, ...) and the medians are compared, so that a busy machine hurts both alike.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedecho import DigitsTask, Experiment, load, simulate
from fedecho.core.layout import Layout
from fedecho.core.randomness import derive, torch_rng
from fedecho.distill import Bank, Student
from fedecho.runs.record import read_record

Jobs = list[tuple[int, int]]
"""(client, seed) of every job that a run trains."""


def jobs_of(experiment: Experiment) -> Jobs:
    """Read off a recorded run: what was trained is what arrived."""
    with tempfile.TemporaryDirectory() as folder:
        simulate(experiment, out=folder)
        lines = [line for line in read_record(Path(folder)) if line.get("status") == "accepted"]
    return [(line["client"], derive(experiment.seed, "job", line["dispatch"])) for line in lines]


def bare_loop(experiment: Experiment, jobs: Jobs) -> None:
    """Plain PyTorch: a module in torch's own memory format, torch.optim.SGD, the same batches."""
    task, local = experiment.task, experiment.local
    module = task.network(0).to(memory_format=torch.contiguous_format).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=local.client_lr, weight_decay=local.weight_decay)
    for client, seed in jobs:
        _bare_job(task, module, optimizer, client, seed, local.epochs, local.batch_size)


def _bare_job(
    task: DigitsTask, module: nn.Module, optimizer: torch.optim.SGD, client: int, seed: int, epochs: int, batch_size: int
) -> None:
    generator = torch_rng(seed, "shuffle")
    for _ in range(epochs):
        for rows in torch.randperm(task.num_examples(client), generator=generator).split(batch_size):
            images, labels = task.batch(client, rows, generator)
            loss = cross_entropy(module(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def recorded(experiment: Experiment, **options: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        simulate(experiment, out=folder, **options)


def serial_table(repeats: int = 5) -> None:
    experiment = load("digits", algorithm="fedbuff")
    jobs = jobs_of(experiment)
    bare_loop(experiment, jobs)
    times = [(seconds(lambda: bare_loop(experiment, jobs)), seconds(lambda: recorded(experiment))) for _ in range(repeats)]
    bare, ours = median(time[0] for time in times), median(time[1] for time in times)
    print(f"serial: digits, FedBuff, {len(jobs)} jobs, evaluated every {experiment.eval_every} versions, recorded to disk")
    print(f"  bare loop {bare:.2f} s, simulation {ours:.2f} s: ratio {ours / bare:.3f} (at most 1.10)")


def _half(arguments: tuple[Experiment, Jobs]) -> None:
    torch.set_num_threads(1)
    bare_loop(*arguments)


def pool_table(repeats: int = 2, width: int = 128) -> None:
    """Start-up of the workers is left out of neither side: both pools of processes are started inside the timed part."""
    experiment = load("digits", algorithm="fedbuff", settings=[f"task.width={width}", "local.batch_size=32"])
    jobs = jobs_of(experiment)
    context = multiprocessing.get_context("spawn")

    def two_bare() -> None:
        with context.Pool(2) as pool:
            pool.map(_half, [(experiment, jobs[::2]), (experiment, jobs[1::2])], chunksize=1)

    times = [
        (
            seconds(lambda: bare_loop(experiment, jobs)),
            seconds(two_bare),
            seconds(lambda: recorded(experiment)),
            seconds(lambda: recorded(experiment, executor="pool", workers=2)),
        )
        for _ in range(repeats)
    ]
    bare, bare2, serial, pool = (median(column) for column in zip(*times, strict=True))
    size = sum(p.numel() for p in experiment.task.network(0).parameters())
    print(f"pool: the same with a CNN of {size:,} parameters, batch 32, 2 workers (their start included)")
    print(f"  bare loop {bare:.1f} s, in two processes {bare2:.1f} s: {bare / bare2:.2f} times as fast")
    print(f"  serial {serial:.1f} s, pool {pool:.1f} s: {serial / pool:.2f} times as fast (at least 1.4)")


def bank_table(arrivals: int = 100, num_unlabeled: int = 1000, num_classes: int = 10) -> None:
    """Time per arrival at the server: the client's model is asked for its logits on U, they replace its old ones, the mean is read.

    Every client has logits of its own, so that with 10,000 of them the old ones come from memory and not from the cache
    (in a loop that does nothing else, where 100 of them stay in the cache, that shows: 43 us and 50 to 55 us).
    """
    task = DigitsTask(num_unlabeled=num_unlabeled)
    module = task.network(0)
    network = Layout.of(module).bind(module)
    student, weights = Student(network, task.logits, num_unlabeled), network.weights.clone()
    banks = {}
    for num_clients in (100, 10_000):
        banks[num_clients] = Bank(num_unlabeled, num_classes, torch.device("cpu"))
        for client, logits in enumerate(torch.randn(num_clients, num_unlabeled, num_classes).unbind()):
            banks[num_clients].put(client, logits, 0)
    spent: dict[int, list[tuple[float, float]]] = {100: [], 10_000: []}
    for number in range(arrivals):
        for num_clients, bank in banks.items():
            began = time.perf_counter()
            logits = student.infer(weights)
            asked = time.perf_counter()
            bank.put(derive(0, number) % num_clients, logits, number)
            bank.teacher()
            spent[num_clients].append((time.perf_counter() - began, time.perf_counter() - asked))
    few, many = ([median(column) for column in zip(*spent[size], strict=True)] for size in (100, 10_000))
    print(f"bank: an arrival on the digits' CNN, |U| = {num_unlabeled}: inference, replacing the client's logits, the mean")
    print(f"  N = 100 {1e3 * few[0]:.2f} ms, N = 10,000 {1e3 * many[0]:.2f} ms: ratio {many[0] / few[0]:.2f} (within 1.2)")
    print(f"  without the inference {1e6 * few[1]:.0f} us and {1e6 * many[1]:.0f} us")


TABLES = {"serial": serial_table, "pool": pool_table, "bank": bank_table}


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="all by default")
    for name in parser.parse_args().tables or TABLES:
        TABLES[name]()


if __name__ == "__main__":
    main()

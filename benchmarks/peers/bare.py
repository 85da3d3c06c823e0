"""The baseline: a module, torch.optim.SGD and a loop with the job's SGD steps.

    python -m benchmarks.peers.bare JOB

``workers`` processes share the updates. ``options``: "bf16" computes in bf16, channels-last; "compiled" compiles the module, and
"heap" keeps freed memory, as ours does.
"""

from contextlib import nullcontext

import torch
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.job import Job, batch, examples, network, settle, told
from benchmarks.peers.tally import say, step
from fedecho.learning.trainer import keep_heap


def train(job: Job, updates: range) -> None:
    settle(job)
    if "heap" in job.options:
        keep_heap()
    module, precision = prepared(job)
    clients = [examples(job, client) for client in range(job.num_clients)]
    optimizer = torch.optim.SGD(module.parameters(), lr=job.client_lr)
    for number in updates:
        for local in range(job.num_local_steps):
            if "compiled" in job.options:
                step()
            images, labels = batch(job, clients[number % job.num_clients], local)
            with precision:
                loss = cross_entropy(module(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if job.device != "cpu":
        torch.cuda.synchronize()


def prepared(job: Job) -> tuple[nn.Module, torch.autocast | nullcontext[None]]:
    module = network(job.network).to(job.device).train()
    precision: torch.autocast | nullcontext[None] = nullcontext()
    if "bf16" in job.options:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        precision = torch.autocast(job.device, torch.bfloat16)
    if "compiled" in job.options:
        module = torch.compile(module, mode="max-autotune-no-cudagraphs" if "autotune" in job.options else None)
    return module, precision


def main() -> None:
    job = told()
    if job.workers == 1:
        train(job, range(job.num_updates))
    else:
        shares = [range(worker, job.num_updates, job.workers) for worker in range(job.workers)]
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=train, args=(job, share)) for share in shares]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert all(process.exitcode == 0 for process in processes)
    say("bare", updates=job.num_updates)


if __name__ == "__main__":
    main()

"""The job on this library: FedBuff on the virtual clock.

    python -m benchmarks.peers.ours JOB

More than one of ``workers`` is a pool of processes, or with ``device`` "cuda" the clients at once on the GPU.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.job import Job, examples, network, settle, told
from benchmarks.peers.tally import say
from fedecho import Experiment, FedBuff, LocalTraining, simulate
from fedecho.core.loop import drive
from fedecho.runs.build import Execution, assembled


@dataclass(frozen=True, kw_only=True)
class PeersTask:
    """The job as a task of ours. Nothing is evaluated, as by nobody else."""

    job: Job
    num_unlabeled: int = 0

    @property
    def num_clients(self) -> int:
        return self.job.num_clients

    def network(self, seed: int) -> nn.Module:
        return network(self.job.network)

    def num_examples(self, client: int) -> int:
        return self.job.num_examples

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = self._clients[client]
        return images[rows], labels[rows]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(module(batch[0]), batch[1])

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        raise NotImplementedError("there is no unlabeled set")

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"accuracy": 0.0}

    @cached_property
    def _clients(self) -> list[tuple[Tensor, Tensor]]:
        return [examples(self.job, client) for client in range(self.job.num_clients)]


def experiment_of(job: Job) -> Experiment:
    return Experiment(
        task=PeersTask(job=job),
        algorithm=FedBuff(buffer_size=job.buffer_size),
        local=LocalTraining(client_lr=job.client_lr, num_local_steps=job.num_local_steps, batch_size=job.batch_size),
        concurrency=job.concurrency,
        num_versions=job.num_versions,
        eval_every=job.num_versions,
    )


def on_gpu(job: Job) -> tuple[int, float]:
    """Updates and seconds, from the first dispatch to the last arrival: what is compiled and captured before it is left out."""
    from benchmarks.gpu_steps import NoiseTask

    experiment = replace(experiment_of(job), task=NoiseTask())
    with assembled(experiment, Execution(executor="cuda", workers=job.workers)) as simulation:
        torch.cuda.synchronize()
        began = time.perf_counter()
        drive(simulation.server, simulation.transport, num_versions=job.num_versions)
        torch.cuda.synchronize()
        return simulation.server.counts["accepted"], time.perf_counter() - began


def main(job: Job) -> None:
    settle(job)
    if job.device != "cpu":
        updates, seconds = on_gpu(job)
        note = "bf16, compiled, graphs on streams; with crops and flips, which nobody else makes here"
        say("ours", updates=updates, note=note, steps=updates * job.num_local_steps, seconds=seconds)
        return
    result = simulate(experiment_of(job), executor="serial" if job.workers == 1 else "pool", workers=job.workers)
    say("ours", updates=result.summary.accepted)


if __name__ == "__main__":
    main(told())

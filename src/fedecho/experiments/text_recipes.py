"""The paper's text experiments: MRPC, and a generative model on worked mathematics."""

from dataclasses import replace
from typing import Any

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho, FedEchoPlus
from fedecho.core.memory import Place
from fedecho.core.task import Task
from fedecho.distill.distiller import Distiller
from fedecho.experiments.experiment import Experiment
from fedecho.learning.local import LocalTraining
from fedecho.simulation.runtimes import Runtimes
from fedecho.tasks.mathinstruct import MathInstructTask
from fedecho.tasks.mrpc import MrpcTask

NUM_CLIENTS, CONCURRENCY, BUFFER_SIZE = 10, 5, 3


def mrpc(algorithm: str = "fedecho", seed: int = 0) -> Experiment:
    """The paper's MRPC table: BERT-base, 10 clients, 200 versions, U = 100 test pairs. Wants a GPU and the text extra."""
    distiller = Distiller(distill_lr=3e-7)
    return _text(
        "mrpc",
        MrpcTask(num_clients=NUM_CLIENTS, seed=seed),
        distiller,
        algorithm,
        seed,
        num_versions=200,
        eval_every=5,
        memory="device",
    )


def mathinstruct(algorithm: str = "fedecho", seed: int = 0) -> Experiment:
    """The paper's GSM8K table: Qwen2.5-1.5B-Instruct on MathInstruct, 10 clients, 5 versions. Wants a GPU and the text extra."""
    # Ten queries at a time: fifty, with a vocabulary of 151,936, would take tens of gigabytes.
    distiller = Distiller(distill_lr=3e-6, batch_size=10)
    task = MathInstructTask(num_clients=NUM_CLIENTS, seed=seed)
    return _text("mathinstruct", task, distiller, algorithm, seed, num_versions=5, eval_every=5, memory="cpu")


def _text(
    name: str,
    task: Task,
    distiller: Distiller,
    algorithm: str,
    seed: int,
    *,
    num_versions: int,
    eval_every: int,
    memory: Place,
) -> Experiment:
    """``memory``: where CA2FL's updates and FedAC's control variates live; ten of a whole language model are too much for a GPU.

    The values of the paper's appendix, and its text learning rates; FedAvg and FedAsync, which it leaves out, as FedBuff.
    """
    size = BUFFER_SIZE
    methods: dict[str, tuple[Any, float]] = {
        "fedavg": (FedAvg(buffer_size=size), 3e-5),
        "fedasync": (FedAsync(), 3e-5),
        "fedbuff": (FedBuff(buffer_size=size), 3e-5),
        "ca2fl": (CA2FL(buffer_size=size, num_clients=NUM_CLIENTS, memory=memory), 3e-5),
        "fedac": (FedAC(buffer_size=size, num_clients=NUM_CLIENTS, server_lr=0.1), 3e-6),
        "fadas": (FADAS(buffer_size=size, server_lr=0.1), 3e-6),
        "fedecho": (FedEcho(inner=FedBuff(buffer_size=size), distiller=distiller, seed=seed), 3e-5),
        "fedecho+": (
            FedEchoPlus(inner=FedBuff(buffer_size=size), distiller=replace(distiller, prior_correction=1.0), seed=seed),
            3e-5,
        ),
    }
    method, client_lr = methods[algorithm]
    times = size if algorithm == "fedasync" else 1
    return Experiment(
        name=name,
        task=task,
        algorithm=method,
        local=LocalTraining(optimizer="adamw", client_lr=client_lr, epochs=1, batch_size=8, weight_decay=0.01),
        concurrency=size if algorithm == "fedavg" else CONCURRENCY,
        num_versions=num_versions * times,
        runtimes=Runtimes(profile="large"),
        eval_every=eval_every * times,
        client_memory=memory,
        seed=seed,
    )

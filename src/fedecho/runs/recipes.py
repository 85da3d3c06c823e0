"""Recipes: functions that build a complete experiment for a method, with the paper's values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedecho.algorithms import CA2FL, FADAS, FedAC, FedAsync, FedAvg, FedBuff, FedEcho, FedEchoPlus
from fedecho.core.admission import Admission
from fedecho.core.task import Task
from fedecho.distill.distiller import Distiller
from fedecho.learning.local import LocalTraining
from fedecho.runs.experiment import Experiment
from fedecho.simulation.runtimes import Runtimes
from fedecho.storage.client_memory import MemoryPlace
from fedecho.tasks.partition import DirichletPartitioner, HeldClassesPartitioner
from fedecho.tasks.text.mathinstruct import MathInstructTask
from fedecho.tasks.text.mrpc import MrpcTask
from fedecho.tasks.vision.cifar import CifarTask
from fedecho.tasks.vision.digits import DigitsTask

NUM_CLIENTS, CONCURRENCY, BUFFER_SIZE = 10, 5, 3


def mrpc(algorithm: str = "fedecho", seed: int = 0) -> Experiment:
    """The paper's MRPC table: BERT-base, 10 clients, 200 versions, U = 100 test pairs. Needs a GPU and the text extra."""
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
    """The paper's GSM8K table: Qwen2.5-1.5B-Instruct on MathInstruct, 10 clients, 5 versions. Needs a GPU and the text extra."""
    # Batches of 10 queries: 50 with a vocabulary of 151,936 would take tens of gigabytes.
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
    memory: MemoryPlace,
) -> Experiment:
    """Build a text recipe with the values and learning rates of the paper's appendix.

    FedAvg and FedAsync, which are not in the paper, use FedBuff's values. ``memory`` is where CA2FL's cached updates and FedAC's
    control variates are kept: ten copies of a whole language model do not fit on a GPU.
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


def digits(algorithm: str = "fedecho", seed: int = 0) -> Experiment:
    """UCI digits, 20 clients of few classes each, one in ten of them 50 times slower: seconds on a laptop."""
    num_clients, concurrency, buffer_size = 20, 10, 3
    distiller = Distiller(distill_lr=1e-4, batch_size=30)
    methods: dict[str, tuple[Any, float]] = {
        "fedavg": (FedAvg(buffer_size=buffer_size), 0.05),
        "fedasync": (FedAsync(), 0.05),
        "fedbuff": (FedBuff(buffer_size=buffer_size), 0.05),
        "ca2fl": (CA2FL(buffer_size=buffer_size, num_clients=num_clients), 0.05),
        "fedac": (FedAC(buffer_size=buffer_size, num_clients=num_clients, server_lr=3e-3), 0.05),
        "fadas": (FADAS(buffer_size=buffer_size, server_lr=3e-3), 0.05),
        "fedecho": (FedEcho(inner=FedBuff(buffer_size=buffer_size), distiller=distiller, seed=seed), 0.05),
        "fedecho+": (
            FedEchoPlus(inner=FedBuff(buffer_size=buffer_size), distiller=replace(distiller, prior_correction=1.0), seed=seed),
            0.05,
        ),
    }
    method, client_lr = methods[algorithm]
    return Experiment(
        name="digits",
        task=DigitsTask(num_clients=num_clients, num_unlabeled=300, partition=DirichletPartitioner(alpha=0.03), seed=seed),
        algorithm=method,
        local=LocalTraining(client_lr=client_lr, epochs=2, batch_size=16),
        concurrency=buffer_size if algorithm == "fedavg" else concurrency,
        num_versions=300 if algorithm == "fedasync" else 100,
        runtimes=Runtimes(profile="large"),
        eval_every=6 if algorithm == "fedasync" else 2,
        seed=seed,
    )


def stragglers(algorithm: str = "fedecho", seed: int = 0) -> Experiment:
    """Digits of which two classes belong to the two slow clients of 20 alone: do their updates reach the model?"""
    num_clients, buffer_size, num_versions = 20, 3, 800
    distiller = Distiller(distill_lr=3e-5, batch_size=30)
    # The rates are those that `fedecho table straggler-search` found best, on a seed that no table reports.
    methods: dict[str, tuple[Any, float]] = {
        "fedavg": (FedAvg(buffer_size=5), 0.1),
        "fedasync": (FedAsync(mixing=0.9), 0.2),
        "fedbuff": (FedBuff(buffer_size=buffer_size), 0.1),
        "ca2fl": (CA2FL(buffer_size=buffer_size, num_clients=num_clients, server_lr=0.5), 0.02),
        "fedac": (FedAC(buffer_size=buffer_size, num_clients=num_clients, server_lr=1e-3, correction="once"), 0.02),
        "fadas": (FADAS(buffer_size=buffer_size, server_lr=1e-2), 0.2),
        "fedecho": (FedEcho(inner=FedBuff(buffer_size=buffer_size), distiller=distiller, seed=seed), 0.05),
        "fedecho+": (
            FedEchoPlus(
                inner=FedBuff(buffer_size=buffer_size),
                distiller=replace(distiller, distill_lr=1e-4, prior_correction=1.0),
                seed=seed,
            ),
            0.05,
        ),
    }
    method, client_lr = methods[algorithm]
    # About equal virtual time: FedAsync makes a version of each update, FedAvg waits for the slowest of its clients.
    length, evals = {"fedasync": (3 * num_versions, 60), "fedavg": (22, 1)}.get(algorithm, (num_versions, 20))
    return Experiment(
        name="stragglers",
        task=DigitsTask(num_clients=num_clients, num_unlabeled=300, partition=HeldClassesPartitioner(), seed=seed),
        algorithm=method,
        local=LocalTraining(client_lr=client_lr, epochs=2, batch_size=16),
        # The default ratio of 100 refuses stragglers here: once the others have converged, their updates are very small.
        admission=Admission(max_norm_ratio=1e6),
        concurrency=5 if algorithm == "fedavg" else 10,
        num_versions=length,
        runtimes=Runtimes(profile="large", rule="order"),
        eval_every=evals,
        seed=seed,
    )


def cifar10(algorithm: str = "fedecho", seed: int = 0) -> Experiment:
    """The paper's table 1: CIFAR-10, ResNet-18, 50 clients, 500 versions, U = 2,000 images of CIFAR-100. Needs a GPU."""
    return _cifar(algorithm, seed, "cifar10", "cifar100", alpha=0.1, plain_lr=0.01, num_versions=500)


def cifar100(algorithm: str = "fedecho", seed: int = 0) -> Experiment:
    """The paper's table 2: CIFAR-100, ResNet-18, 50 clients, 1,000 versions, U = 2,000 images of CIFAR-10. Needs a GPU."""
    return _cifar(algorithm, seed, "cifar100", "cifar10", alpha=0.03, plain_lr=0.003, num_versions=1000)


def _cifar(
    algorithm: str,
    seed: int,
    dataset: Literal["cifar10", "cifar100"],
    unlabeled: str,
    *,
    alpha: float,
    plain_lr: float,
    num_versions: int,
) -> Experiment:
    """The values of the paper's section 5 and tables 7 and 8. FedAvg and FedAsync, which are not in it, use FedBuff's values."""
    num_clients, buffer_size = 50, 5
    methods: dict[str, tuple[Any, float]] = {
        "fedavg": (FedAvg(buffer_size=buffer_size), plain_lr),
        "fedasync": (FedAsync(), plain_lr),
        "fedbuff": (FedBuff(buffer_size=buffer_size), plain_lr),
        "ca2fl": (CA2FL(buffer_size=buffer_size, num_clients=num_clients, memory="device"), plain_lr),
        "fedac": (FedAC(buffer_size=buffer_size, num_clients=num_clients, correction="once"), 0.1),
        "fadas": (FADAS(buffer_size=buffer_size), 0.1),
        "fedecho": (FedEcho(inner=FedBuff(buffer_size=buffer_size), distiller=Distiller(), seed=seed), 0.03),
        "fedecho+": (
            FedEchoPlus(
                inner=FedBuff(buffer_size=buffer_size),
                # U differs from the clients' images, so mean predictions on it say little about rare classes.
                distiller=Distiller(prior_correction=1.0, prior_floor=0.1),
                seed=seed,
            ),
            0.03,
        ),
    }
    method, client_lr = methods[algorithm]
    return Experiment(
        name=dataset,
        task=CifarTask(
            dataset=dataset,
            num_clients=num_clients,
            partition=DirichletPartitioner(alpha=alpha),
            unlabeled=unlabeled,
            seed=seed,
        ),
        algorithm=method,
        local=LocalTraining(client_lr=client_lr, epochs=2, batch_size=50, weight_decay=1e-4),
        concurrency=buffer_size if algorithm == "fedavg" else 25,
        num_versions=num_versions * (buffer_size if algorithm == "fedasync" else 1),
        runtimes=Runtimes(profile="large"),
        eval_every=25 if algorithm == "fedasync" else 5,
        client_memory="device",
        seed=seed,
    )


@dataclass(frozen=True)
class Recipe:
    make: Callable[..., Experiment]

    @property
    def summary(self) -> str:
        return (self.make.__doc__ or "").strip().splitlines()[0]


RECIPES: dict[str, Recipe] = {
    "digits": Recipe(digits),
    "stragglers": Recipe(stragglers),
    "cifar10": Recipe(cifar10),
    "cifar100": Recipe(cifar100),
    "mrpc": Recipe(mrpc),
    "mathinstruct": Recipe(mathinstruct),
}

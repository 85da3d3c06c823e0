"""One run: the library's server, algorithm and virtual transport on the problem, with the theorem's learning rates."""

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.theory.problem import CLASSES, Problem, make_problem
from fedecho.algorithms import FedBuff, FedEcho
from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.loop import Moment, drive
from fedecho.core.randomness import numpy_rng, uniform
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, GlobalModel, Weights
from fedecho.distill import Distiller, Student
from fedecho.executors.executor import Job, SerialExecutor
from fedecho.simulation.runtimes import ClassRuntimes
from fedecho.simulation.transport import VirtualTransport

FEDBUFF, FEDECHO = "FedBuff", "FedEcho"
FIXED_LOCAL, STRONG_ECHO = "FedBuff, fixed η_l", "FedEcho, η_d ~ T^-1/2"
"""Two that break the theorem's conditions on purpose: eta_l of ``FIXED_AT`` versions whatever T is, and eta_d Q = eta eta_l K."""
FIXED_AT = 256
DISTILL_CONSTANT = 64.0
"""The constant in eta_d's Theta. With 1, FedEcho's figures are FedBuff's to three digits."""
LONG_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is. ``slow`` is how many times as long the slow tenth of the clients takes."""

    method: str
    num_versions: int
    buffer_size: int = 2
    concurrency: int = 8
    slow: float = 8.0
    num_local_steps: int = 2
    num_distill_steps: int = 2
    clip_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Rates:
    """eta, eta_l and eta_d."""

    server_lr: float
    client_lr: float
    distill_lr: float


@dataclass(frozen=True)
class Outcome:
    """mean_t |grad f(x_t)|^2 over t = 1 .. T, the same over the last half, and the staleness that was met."""

    mean_square: float
    last_half: float
    max_staleness: int
    mean_staleness: float
    average_max: float
    """tau_avg: the mean over versions of the largest staleness in that version's buffer."""


def rates_of(problem: Problem, setting: Setting) -> Rates:
    """The theorem's: eta = sqrt(M); eta_l = sqrt(F / (T K S)); eta_d = 64 F / (Q sqrt(T^3 S)); S = sigma_l^2 + K sigma_g^2.

    The paper prints Q behind the fraction; its own last step needs it below: eta_d Q nu^2 / (eta eta_l K) = O(sqrt(F) nu^2 / T).
    """
    steps, versions = setting.num_local_steps, setting.num_versions
    spread = problem.variance_within + steps * problem.variance_between
    at = FIXED_AT if setting.method == FIXED_LOCAL else versions
    server_lr, client_lr = sqrt(setting.buffer_size), sqrt(problem.gap / (at * steps * spread))
    total = DISTILL_CONSTANT * problem.gap / sqrt(versions**3 * spread)
    if setting.method == STRONG_ECHO:
        total = server_lr * client_lr * steps
    return Rates(server_lr, client_lr, total / setting.num_distill_steps)


def trained(problem: Problem, job: Job, client_lr: float, num_steps: int) -> ClientUpdate:
    """K stochastic gradient steps of one client."""
    dispatch = job.dispatch
    base = dispatch.model.weights.params.numpy()
    offset = problem.offsets[dispatch.client]
    scale = problem.noise / sqrt(problem.num_params)
    noise = scale * numpy_rng(dispatch.seed, "noise").standard_normal((num_steps, problem.num_params))
    weights = base.copy()
    for step in range(num_steps):
        weights -= client_lr * (problem.gradient(weights) + offset + noise[step])
    delta = torch.from_numpy(weights - base)
    return ClientUpdate(
        dispatch.client, dispatch.model.version, delta, dispatch.model.weights.buffers, len(problem.inputs), num_steps
    )


def algorithm_of(problem: Problem, setting: Setting, rates: Rates) -> Any:
    inner = FedBuff(buffer_size=setting.buffer_size, server_lr=rates.server_lr)
    if setting.method in (FEDBUFF, FIXED_LOCAL):
        return inner
    distiller = Distiller(
        distill_lr=rates.distill_lr,
        optimizer="sgd",
        num_distill_steps=setting.num_distill_steps,
        batch_size=16,
        clip_norm=setting.clip_norm,
    )
    unlabeled = torch.from_numpy(problem.unlabeled)
    student = Student(
        double_network(problem.inputs.shape[1]), lambda module, rows: module(unlabeled[rows]), len(problem.unlabeled)
    )
    return FedEcho(inner=inner, distiller=distiller, seed=setting.seed, student=student)


def double_network(num_features: int) -> BoundNetwork:
    """W as a module in float64."""
    module = nn.Linear(num_features, CLASSES, bias=False).double()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Layout.of(module).bind(module)
    finally:
        torch.set_default_dtype(before)


def runtimes_of(num_clients: int, slow: float, seed: int) -> ClassRuntimes:
    """A tenth takes ``slow`` times as long as the others, whose runtimes are drawn from U(1, 2)."""
    classes = ["long" if uniform(seed, "slow", client) < LONG_SHARE else "short" for client in range(num_clients)]
    return ClassRuntimes({"short": (1, 2), "long": (slow, 2 * slow)}, classes, seed)


def run(problem: Problem, setting: Setting) -> Outcome:
    """Drive it to version T."""
    rates = rates_of(problem, setting)
    start = Weights(torch.from_numpy(problem.start.copy()), torch.zeros(0, dtype=torch.float64))
    server = Server(
        algorithm=algorithm_of(problem, setting, rates),
        model=GlobalModel(0, start),
        num_clients=problem.num_clients,
        concurrency=setting.concurrency,
        seed=setting.seed,
    )
    executor = SerialExecutor(lambda job: trained(problem, job, rates.client_lr, setting.num_local_steps))
    runtimes = runtimes_of(problem.num_clients, setting.slow, setting.seed)
    transport = VirtualTransport(executor=executor, runtimes=runtimes, num_clients=problem.num_clients, seed=setting.seed)
    squares, staleness = [square_norm(problem, start)], []

    def watch(moment: Moment) -> None:
        assert moment.receipt.status == "accepted", moment.receipt.reason
        staleness.append(moment.receipt.staleness)
        if moment.step is not None:
            squares.append(square_norm(problem, moment.step.model.weights))

    drive(server, transport, num_versions=setting.num_versions, watch=watch)
    met = np.array(staleness).reshape(setting.num_versions, setting.buffer_size)
    seen = np.array(squares[:-1])  # x_1 .. x_T
    half = float(seen[len(seen) // 2 :].mean())
    return Outcome(float(seen.mean()), half, int(met.max()), float(met.mean()), float(met.max(axis=1).mean()))


def square_norm(problem: Problem, weights: Weights) -> float:
    gradient = problem.gradient(weights.params.numpy())
    return float(gradient @ gradient)


@cache
def the_problem() -> Problem:
    """One for all runs of a process."""
    return make_problem()


def run_setting(setting: Setting) -> Outcome:
    """For worker processes."""
    torch.set_num_threads(1)
    return run(the_problem(), setting)

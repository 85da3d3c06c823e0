"""Answers "is my U good enough?" for a finished run, and compares it with other unlabeled sets.

A finished run keeps its final model, and no client's. So each inspected client trains once more from the final model, on its own
data and with the run's settings, and predicts on every U. The teachers are therefore fresh: stragglers' stale ones are worse. A
few buffers of these clients then make the inner method's step, from its initial state, and distillation follows on every U.
Accuracy before and after is that of the task's held-out data.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fedecho.algorithms.fedecho import FedEcho
from fedecho.core.algorithm import call_advance, call_init, call_receive, demands
from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.randomness import derive, numpy_rng
from fedecho.core.task import TokenTask, scores_of
from fedecho.core.types import Arrival, ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.distill.bank import Bank
from fedecho.distill.diagnostics import agreement, relative_shift
from fedecho.distill.distiller import Adam
from fedecho.distill.loss import normalized_entropy
from fedecho.distill.student import student_for
from fedecho.learning.trainer import Trainer
from fedecho.runs.build import inputs_of, one_thread, training_task
from fedecho.runs.config import ConfigError, from_config, to_config
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import is_deployed
from fedecho.runs.identity import check_inputs
from fedecho.runs.record import read_header
from fedecho.runs.settings import setting_of
from fedecho.runs.trained import trained

NUM_BUFFERS = 3
UNSURE, SKEWED, FEW, LOSS = 0.9, 0.7, 0.1, 0.01
"""Limits of the verdict: entropy, balance, the share of clients that cover a class, and lost accuracy."""
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class InspectedU:
    """What the clients say on one unlabeled set, and what one distillation on it does."""

    unlabeled: str
    """The settings that differ from the run's, or "the run's"."""
    rows: int
    entropy: float
    """The teacher's mean normalized entropy: 0 is certain, 1 uniform."""
    balance: float
    """The normalized entropy of the clients' mean prediction: 1 if U shows all classes equally."""
    least_class: int
    least_coverage: int
    """How many clients have evidence for ``least_class``, which has the fewest."""
    num_clients: int
    agreement: float
    lowest_agreement: float
    shift: float
    accuracy_before: float
    accuracy_after: float
    """Means over the buffers, of the inner step and after distillation."""

    @property
    def verdict(self) -> str:
        gain = self.accuracy_after - self.accuracy_before
        found = []
        if self.entropy > UNSURE:
            found.append("the teacher is nearly uniform: U is too far from the clients' data")
        if self.least_coverage < max(1.0, FEW * self.num_clients):
            known = f"{self.least_coverage} of {self.num_clients} clients"
            found.append(f"class {self.least_class} has evidence from {known}: add examples that show it, or more clients")
        if self.balance < SKEWED:
            found.append("U shows few classes: balance it, or set shared_prior=1 with prior_correction")
        if gain < -LOSS:
            found.append("distillation lowers accuracy: use another U, or a lower distill_lr")
        return "; ".join(found) or "good"


def inspect_run(
    folder: Path, candidates: Sequence[str] = (), num_clients: int = 20, progress: Progress = lambda text: None
) -> list[InspectedU]:
    """Inspect the U of a finished run, then each candidate: settings such as ``task.unlabeled=stl10``, joined by commas."""
    base = _experiment(folder)
    experiments = {"the run's": base, **{text: _with(base, text) for text in candidates}}
    inputs = [inputs_of(each, each.task) for each in experiments.values()]  # before anything is trained
    check_inputs(folder, read_header(folder).get("inputs") or {}, inputs[0])
    with one_thread():
        module = trained(folder)
        network = Layout.of(module).bind(module)
        final = network.weights.clone()
        chosen = np.unique(np.linspace(0, base.task.num_clients - 1, min(num_clients, base.task.num_clients)).astype(int))
        clients, found = [int(client) for client in chosen], []
        by_sizes: dict[tuple[int, ...], list[ClientUpdate]] = {}
        for label, experiment in experiments.items():
            # Some tasks take U from the clients' data: their clients are trained on what this U leaves them.
            sizes = tuple(experiment.task.num_examples(client) for client in clients)
            if sizes not in by_sizes:
                by_sizes[sizes] = list(_updates(experiment, network, final, clients, progress))
            progress(f"inspecting U: {label}")
            found.append(_inspected(label, experiment, network, final, by_sizes[sizes]))
    return found


def _experiment(folder: Path) -> Experiment:
    header = read_header(folder)
    if is_deployed(header):
        raise ConfigError(f"{folder} holds a deployed run: its clients' data are on the nodes, so it cannot be inspected")
    if header["config"] is None:
        raise ConfigError(
            f"{folder} used your own task or method: inspect it from Python, with the functions of fedecho.distill"
        )
    experiment = from_config(header["config"])
    if not isinstance(experiment.algorithm, FedEcho):
        raise ConfigError(f"{folder} is a run without distillation: inspect a run of fedecho or fedecho+")
    if isinstance(experiment.task, TokenTask):
        raise ConfigError(f"{folder} trained a language model: inspect compares classes, and its U has tokens")
    return experiment


def _with(base: Experiment, candidate: str) -> Experiment:
    """Return the experiment with another U. Only settings of the task may change."""
    tree = to_config(base)
    for text in candidate.split(","):
        text = text.strip() if "=" in text else f"task.unlabeled={text.strip()}"
        changes = setting_of(text)
        if set(changes) != {"task"}:
            raise ConfigError(f"--unlabeled takes settings of the task, such as task.unlabeled=stl10, got {text}")
        tree["task"] = tree["task"] | changes["task"]
    return from_config(tree)


def _updates(
    experiment: Experiment, network: BoundNetwork, final: Weights, clients: Sequence[int], progress: Progress
) -> Iterator[ClientUpdate]:
    trainer = Trainer(training_task(experiment), experiment.local_training, network)
    model = _model(experiment, final)
    for number, client in enumerate(clients):
        progress(f"training client {number + 1} of {len(clients)}")
        yield trainer.train(Dispatch(number, client, model, derive(experiment.seed, "inspect", client)))


def _model(experiment: Experiment, final: Weights) -> GlobalModel:
    needs_correction = demands(experiment.algorithm).control_variates
    return GlobalModel(experiment.num_versions, final, torch.zeros_like(final.params) if needs_correction else None)


def _inspected(
    label: str, experiment: Experiment, network: BoundNetwork, final: Weights, updates: Sequence[ClientUpdate]
) -> InspectedU:
    algorithm = experiment.algorithm
    assert isinstance(algorithm, FedEcho)  # noqa: S101 (checked by _experiment)
    distiller = algorithm.distiller
    student = student_for(network, experiment.task, distiller)
    bank = student.bank(distiller)
    assert isinstance(bank, Bank)  # noqa: S101 (for the type checker: the task is no TokenTask)
    for update in updates:
        bank.put(update.client, student.infer(Weights(final.params + update.delta, update.buffers)), 0)
    if not len(bank):
        raise ConfigError("no client's predictions on U are finite: the run has diverged")
    teacher = bank.teacher()
    agreements, counts = agreement(bank, teacher, torch.arange(student.num_unlabeled)), bank.coverage()
    mean = torch.stack([bank.mean_prediction(client) for client in bank.heard_at]).mean(dim=0).clamp_min(1e-12)
    shifts, accuracies = list[float](), list[tuple[float, float]]()
    for number, buffer in enumerate(_buffers(experiment, updates)):
        stepped = _inner_step(algorithm, _model(experiment, final), buffer)
        seed = derive(experiment.seed, "inspect", "distillation", number)
        _, distilled, _ = distiller.distill(student, Adam.fresh(final.params), stepped, teacher, seed)
        shifts.append(float(relative_shift(final.params, stepped.params, distilled.params)))
        accuracies.append((_accuracy(experiment, network, stepped), _accuracy(experiment, network, distilled)))
    before, after = (fmean(each) for each in zip(*accuracies, strict=True))
    return InspectedU(
        unlabeled=label,
        rows=student.num_unlabeled,
        entropy=float(normalized_entropy(teacher)),
        balance=float(-(mean * mean.log()).sum()) / log(max(len(mean), 2)),
        least_class=counts.index(min(counts)),
        least_coverage=min(counts),
        num_clients=len(bank),
        agreement=float(agreements.mean()),
        lowest_agreement=float(agreements.min()),
        shift=fmean(shifts),
        accuracy_before=before,
        accuracy_after=after,
    )


def _buffers(experiment: Experiment, updates: Sequence[ClientUpdate]) -> Iterator[list[ClientUpdate]]:
    """Draw disjoint buffers of the method's size: a few, or fewer if there are not enough clients."""
    size = min(experiment.buffer_size or 1, len(updates))
    order = numpy_rng(experiment.seed, "inspect", "buffers").permutation(len(updates))
    for number in range(min(NUM_BUFFERS, len(updates) // size)):
        yield [updates[place] for place in order[number * size : (number + 1) * size]]


def _inner_step(algorithm: FedEcho[Any], model: GlobalModel, buffer: Sequence[ClientUpdate]) -> Weights:
    inner = algorithm.inner
    state = call_init(inner, model)
    for update in buffer:
        state = call_receive(inner, state, Arrival(update, model, model))
    return call_advance(inner, state, model).weights


def _accuracy(experiment: Experiment, network: BoundNetwork, weights: Weights) -> float:
    network.load(weights)
    return float(scores_of(experiment.task, network.module)["accuracy"])

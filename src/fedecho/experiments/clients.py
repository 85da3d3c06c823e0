"""What an experiment's clients train on and send: their own, privately, or what attackers make of it."""

from collections.abc import Set

import torch

from fedecho.core.layout import Layout
from fedecho.core.task import Task
from fedecho.core.types import ClientUpdate, Dispatch
from fedecho.experiments.experiment import Experiment
from fedecho.simulation.attacks import PoisonedTask
from fedecho.simulation.transport import Sent


def attackers_of(experiment: Experiment) -> Set[int]:
    return experiment.attack.attackers(experiment.task.num_clients, experiment.seed)


def training_task(experiment: Experiment) -> Task:
    """What clients train on: the task, with false labels where there are attackers that flip them."""
    task, attack = experiment.task, experiment.attack
    if not attack.poisons_data:
        return task
    num_classes = getattr(task, "num_classes", None)
    if num_classes is None:
        raise ValueError(
            f"attack.kind = {attack.kind!r} needs a task that says its num_classes; {type(task).__name__} does not"
        )
    return PoisonedTask(task, attack, attackers_of(experiment), num_classes)


def sent_by(experiment: Experiment, layout: Layout, device: torch.device) -> Sent:
    """Privacy first, as every client has it; then what attackers do to their updates."""
    privacy, attack, attackers = experiment.privacy, experiment.attack, attackers_of(experiment)
    variances = layout.variances(device)

    def sent(dispatch: Dispatch, update: ClientUpdate) -> ClientUpdate:
        if privacy.on and privacy.where == "client":
            update = privacy.sent(update, dispatch.model, dispatch.seed, variances)
        return attack.sent(dispatch, update) if dispatch.client in attackers else update

    return sent

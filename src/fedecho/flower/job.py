"""One job on a node: a dispatch comes in as records, the client trains, its answer and its memory go out as records."""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from secrets import randbits
from typing import Any

import torch
from flwr.app import RecordDict

from fedecho.core.types import ClientUpdate, Dispatch, Weights
from fedecho.experiments.build import bound_network
from fedecho.experiments.experiment import Experiment
from fedecho.flower.codec import Codec
from fedecho.flower.keys import CONTROL
from fedecho.flower.run_config import Settings
from fedecho.learning.privacy import Privacy
from fedecho.learning.trainer import Trainer


class PrivateError(RuntimeError):
    """A failure of a client whose reports are private: only its kind goes to the server."""


def experiment_of(reference: str, run_config: Mapping[str, Any]) -> Experiment:
    """What ``module:function`` makes of the app's configuration."""
    module, _, name = reference.partition(":")
    experiment = getattr(import_module(module), name)(run_config)
    if not isinstance(experiment, Experiment):
        raise TypeError(f"{reference} must return an Experiment, got {type(experiment).__name__}")
    return experiment


def work(
    reference: str, run_config: Mapping[str, Any], content: RecordDict, state: RecordDict
) -> tuple[RecordDict, RecordDict]:
    """The answer to a dispatch, and the client's state after it (its control variate c_i, if the method keeps one)."""
    trainer, codec, privacy = _loaded(reference, json.dumps(dict(run_config), sort_keys=True))
    dispatch = codec.read_dispatch(content)
    if not 0 <= dispatch.client < trainer.task.num_clients:
        raise ValueError(f"client {dispatch.client} is outside 0 to {trainer.task.num_clients - 1}")
    control = codec.read_control(state)
    try:
        update = trainer.train(dispatch, control)
    except Exception as error:
        if privacy is None:
            raise
        raise PrivateError(f"{type(error).__name__} (its text may quote data and stays on the node)") from None
    answer = (
        _private(update, dispatch, codec, privacy) if privacy is not None else codec.answer(update, trainer.network.weights)
    )
    if update.correction is not None:
        moved = update.correction if control is None else control + update.correction
        state = RecordDict({CONTROL: codec.control(moved)})
    return answer, state


def _private(update: ClientUpdate, dispatch: Dispatch, codec: Codec, privacy: Privacy) -> RecordDict:
    """Clipped and noised on the node. The noise is the client's secret: a seed that the server knows would undo it."""
    base = dispatch.model.weights
    sent = privacy.sent(update, dispatch.model, randbits(62), codec.layout.variances(base.params.device))
    return codec.answer(sent, Weights(base.params + sent.delta, sent.buffers))


@lru_cache(maxsize=1)
def _loaded(reference: str, run_config: str) -> tuple[Trainer, Codec, Privacy | None]:
    """The model and the data of an app stay loaded from job to job."""
    settings = json.loads(run_config)
    if threads := Settings.of(settings).threads:
        torch.set_num_threads(threads)
    experiment = experiment_of(reference, settings)
    network = bound_network(experiment.task, experiment.seed)
    here = experiment.privacy.on and experiment.privacy.where == "client"
    trainer = Trainer(experiment.task, experiment.local_training, network)
    return trainer, Codec(network.layout), experiment.privacy if here else None

"""The model a run ended with: as a module of its task, and as files that other programs load."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedecho.core.layout import Layout
from fedecho.core.modules import copied
from fedecho.core.randomness import derive
from fedecho.core.task import Saves
from fedecho.runs.config import ConfigError, from_config
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import MODEL
from fedecho.runs.identity import check_same, is_finished, model_digest
from fedecho.runs.record import read_header
from fedecho.runs.summary import Summary


def trained(folder: Path | str, experiment: Experiment | None = None) -> nn.Module:
    """The model of a finished run, on the CPU and in eval mode. A user's own task must be given again, in its experiment."""
    return _loaded(Path(folder), experiment)[1]


def export(folder: Path, target: Path) -> None:
    """Write the run's model into a new folder, in the format of its task's own library."""
    target = target.resolve()  # a link's folder, not the link
    if target == Path.cwd() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ConfigError(f"{target} is there already: choose a new folder")
    task, module = _loaded(folder, None)
    if not isinstance(task, Saves):
        raise ConfigError(
            f"a model of {type(task).__name__} has no format but its tensors' own: they are in {folder / MODEL} under the names of "
            f"the torch module that fedecho.trained({str(folder)!r}) gives"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}-{os.getpid()}")
    part.mkdir()
    try:
        task.save(module, part)
        for path in part.iterdir():  # some libraries write files for nobody else
            path.chmod(0o666 & ~_umask())
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _umask() -> int:
    """There is no way to ask but to set it."""
    now = os.umask(0o077)
    os.umask(now)
    return now


def _loaded(folder: Path, experiment: Experiment | None) -> tuple[Any, nn.Module]:
    header = read_header(folder)
    if experiment is None:
        if header["config"] is None:
            raise ConfigError(f"{folder} used a task or method of its own: give its experiment, trained(folder, experiment)")
        experiment = from_config(header["config"])
    if not is_finished(folder):
        raise ConfigError(f"{folder} holds a run that has not come to its end: `fedecho resume {folder}` goes on with it")
    check_same(folder, experiment)
    module = copied(experiment.task.network(derive(experiment.seed, "network")))
    layout = Layout.of(module)
    try:
        weights = layout.flatten(load_file(folder / MODEL))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {folder / MODEL}: {error}") from None
    except ValueError as error:
        raise ConfigError(
            f"{folder / MODEL} does not fit the task ({error}): are its model and its data what the run had?"
        ) from None
    if model_digest(weights) != Summary.read(folder).model_sha256:
        raise ConfigError(f"{folder / MODEL} is not the model that the run ended with: its digest is not that of the summary")
    # Not bound: libraries that save a module take views of one vector for tensors that are shared.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in layout.named(weights).items():
        tensors[name].data = torch.empty_like(tensors[name]).copy_(tensor)
    return experiment.task, module.eval()

"""Loads the trained model of a finished run, and exports it in its library's own format."""

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedecho.core.layout import Layout
from fedecho.core.modules import copy_module
from fedecho.core.randomness import derive
from fedecho.core.task import Saves, Task
from fedecho.runs.config import ConfigError, from_config
from fedecho.runs.experiment import Experiment
from fedecho.runs.folder import MODEL
from fedecho.runs.identity import check_same, model_digest
from fedecho.runs.record import read_header
from fedecho.runs.summary import Summary, is_finished


def trained(folder: Path | str, experiment: Experiment | None = None) -> nn.Module:
    """Load the model of a finished run, on the CPU and in eval mode. A run with your own classes needs its experiment again."""
    return _loaded(Path(folder), experiment)[1]


def export(folder: Path, target: Path) -> None:
    """Export a run's model to a new folder, in the format of its task's library (such as transformers)."""
    target = target.resolve()  # the target of a link, not the link
    if target == Path.cwd() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ConfigError(f"{target} already exists: choose a new folder")
    task, module = _loaded(folder, None)
    if not isinstance(task, Saves):
        raise ConfigError(
            f"models of {type(task).__name__} have no export format: use the tensors in {folder / MODEL}, or load the torch module "
            f"with fedecho.trained({str(folder)!r})"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}-{os.getpid()}")
    part.mkdir()
    try:
        task.save(module, part)
        for path in part.iterdir():  # some libraries write files that only the owner can read
            path.chmod(0o666 & ~_umask())
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _umask() -> int:
    """The current umask. The only way to read it is to set it."""
    current = os.umask(0o077)
    os.umask(current)
    return current


def _loaded(folder: Path, experiment: Experiment | None) -> tuple[Task, nn.Module]:
    header = read_header(folder)
    if experiment is None:
        if header["config"] is None:
            raise ConfigError(f"{folder} used your own task or method: give its experiment, trained(folder, experiment)")
        experiment = from_config(header["config"])
    if not is_finished(folder):
        raise ConfigError(f"{folder} holds an unfinished run: continue it with `fedecho resume {folder}`")
    check_same(folder, experiment)
    module = copy_module(experiment.task.network(derive(experiment.seed, "network")))
    layout = Layout.of(module)
    try:
        weights = layout.flatten(load_file(folder / MODEL))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {folder / MODEL}: {error}") from None
    except ValueError as error:
        raise ConfigError(
            f"{folder / MODEL} does not fit the task ({error}): check that its model and data are those of the run"
        ) from None
    if model_digest(weights) != Summary.read(folder).model_sha256:
        raise ConfigError(f"{folder / MODEL} is not the model of this run: its digest differs from the one in the summary")
    # Not bound to one flat vector: libraries that save a module would take the views for shared tensors.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in layout.named(weights).items():
        tensors[name].data = torch.empty_like(tensors[name]).copy_(tensor)
    return experiment.task, module.eval()

"""The identity of a run: its configuration and input digests, which are compared when it is resumed."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedecho.core.task import Task, counts_labels
from fedecho.core.types import Weights
from fedecho.runs.build import Simulation
from fedecho.runs.config import ConfigError, completed, differences, to_config
from fedecho.runs.experiment import Experiment, attributes, describe
from fedecho.runs.record import JsonObject, read_header
from fedecho.runs.record_schema import MODEL_FILES, Header
from fedecho.runs.software import software
from fedecho.simulation.runtimes import Classes, ClassRuntimes, ClientRuntimes
from fedecho.storage.files import arrays_sha256, file_sha256
from fedecho.storage.user_files import FileError

MOST_LISTED = 10_000
"""Above this many clients, a header has totals instead of one entry per client."""


def check_same(folder: Path, experiment: Experiment) -> None:
    """Check that the run in ``folder`` has this configuration. For a user's own classes, names and plain fields are compared."""
    header = read_header(folder)
    ours, theirs = config_of(experiment), header["config"]
    if ours is None or theirs is None:
        ours = {"name": experiment.name, "seed": experiment.seed, "num_versions": experiment.num_versions}
        theirs = {name: value for name, value in header.items() if name in ours}
        parts, recorded = header.get("parts"), header.get("attributes")
        if parts is not None:
            ours, theirs = ours | describe(experiment), theirs | parts
        if recorded is not None:  # only the method's: a task may count calls or cache what it has read
            ours, theirs = ours | _of_method(attributes(experiment)), theirs | _of_method(recorded)
    else:
        theirs = completed(theirs)
    changes = differences(ours, theirs)
    if changes:
        raise ConfigError(f"{folder} holds a run with another configuration: {'; '.join(changes[:3])}")
    _check_model(folder, (header.get("notes") or {}).get(MODEL_FILES), experiment.task)
    _check_trace(folder, experiment, header)


def _of_method(values: Mapping[str, Any]) -> JsonObject:
    return {name: value for name, value in values.items() if name.startswith("algorithm.")}


def _check_model(folder: Path, recorded: str | None, task: Any) -> None:
    """Check that the files of a pretrained model have not changed under the same name."""
    files = _files_of(task).get(MODEL_FILES)
    if recorded is None or files is None:
        return
    if not files.startswith(str(recorded)):
        raise ConfigError(
            f"{folder} began with {task.model} ({recorded}), but its files are now {files}: "
            "restore the former files, or start in a new folder"
        )


def _check_trace(folder: Path, experiment: Experiment, header: Header) -> None:
    """Check that a runtime trace has not changed under the same name: its content determines the schedule."""
    before = header.get("trace_sha256")
    if before is not None and before != trace_digest(experiment):
        raise ConfigError(
            f"the trace {experiment.runtimes.trace} has changed since the run in {folder} began (its sha256 was {before[:12]}...): "
            "restore the old one, or start in a new folder"
        )


def check_inputs(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check that no input file has changed under the same name."""
    for name, digest in before.items():
        if now.get(name, "").split()[:1] != str(digest).split()[:1]:
            raise ConfigError(
                f"{name} has changed since the run in {folder} began (its sha256 was {str(digest)[:12]}...): "
                "restore the old data, or start in a new folder"
            )


def trace_digest(experiment: Experiment) -> str | None:
    trace = experiment.runtimes.trace
    if trace is None:
        return None
    try:
        return file_sha256(Path(trace))
    except FileError as error:
        raise ConfigError(f"cannot read the trace {trace}: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace {trace}: {error.strerror or error}") from None


def model_digest(weights: Weights) -> str:
    return arrays_sha256([weights.params.cpu().numpy(), weights.buffers.cpu().numpy()])


def name_of(algorithm: object) -> str:
    named = to_config(algorithm).get("name") if is_dataclass(algorithm) else None
    return str(named or type(algorithm).__name__)


def config_of(experiment: Experiment) -> JsonObject | None:
    """The experiment as a table, or None if it has a user's own classes, which cannot be serialized."""
    try:
        tree = to_config(experiment)
        return tree if completed(tree) == tree else None
    except (TypeError, ValueError):
        return None


def notes_of(task: Task) -> dict[str, str]:
    """A task's notes for reports: its model, its prompt, substitutions of data or model."""
    notes = getattr(task, "notes", None)
    texts = {str(name): str(text) for name, text in notes.items()} if isinstance(notes, Mapping) else {}
    return texts | _files_of(task)


def _files_of(task: Task) -> dict[str, str]:
    files = getattr(task, "model_files", None)
    return {MODEL_FILES: files} if isinstance(files, str) else {}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a run is: its name, method, seed, length and configuration. ``parts`` are further header entries."""

    name: str
    algorithm: str
    seed: int
    num_versions: int
    config: JsonObject | None
    parts: JsonObject

    @classmethod
    def of(cls, experiment: Experiment) -> "Identity":
        task, config = experiment.task, config_of(experiment)
        described = {"parts": describe(experiment), "attributes": attributes(experiment)} if config is None else {"parts": None}
        return cls(
            name=experiment.name,
            algorithm=name_of(experiment.algorithm),
            seed=experiment.seed,
            num_versions=experiment.num_versions,
            config=config,
            parts={**described, "num_unlabeled": task.num_unlabeled, "notes": notes_of(task)},
        )

    def header(self, execution: JsonObject, num_params: int, **libraries: str) -> JsonObject:
        """The header of a record. ``libraries`` are versions of further software."""
        return {
            "format": 1,
            "name": self.name,
            "algorithm": self.algorithm,
            "config": self.config,
            "seed": self.seed,
            "num_versions": self.num_versions,
            "execution": execution,
            "software": software(**libraries),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "num_params": num_params,
            **self.parts,
        }


def header_of(simulation: Simulation, identity: Identity) -> JsonObject:
    """The header of a simulation's record."""
    experiment, every = simulation.experiment, simulation.experiment.record_every or 1
    return {
        **identity.header(simulation.execution.described(), simulation.layout.num_params),
        "trace_sha256": trace_digest(experiment),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "inputs": dict(simulation.inputs),
        **({"record_every": every} if every > 1 else {}),
        "clients": _clients(experiment.task, simulation.runtimes),
    }


def _clients(task: Task, runtimes: ClientRuntimes) -> JsonObject:
    """The clients' sizes, runtime classes and labels. Totals only if there are very many clients."""
    clients = range(task.num_clients)
    if len(clients) <= MOST_LISTED:
        examples = [task.num_examples(client) for client in clients]
        return {"examples": examples, "classes": [runtimes.class_of(client) for client in clients], **_labels(task)}
    sizes = np.fromiter((task.num_examples(client) for client in clients), np.int64, len(clients))
    counts = (
        runtimes.classes.counts() if isinstance(runtimes, ClassRuntimes) and isinstance(runtimes.classes, Classes) else None
    )
    percentiles = {f"{share}%": int(np.percentile(sizes, share)) for share in (0, 25, 50, 75, 100)}
    return {"num_clients": len(clients), "num_examples": int(sizes.sum()), "examples_at": percentiles, "class_counts": counts}


def _labels(task: Task) -> JsonObject:
    """The label counts of each client, if the task has them."""
    clients = range(task.num_clients)
    return (
        {"labels": [{str(k): int(n) for k, n in task.label_counts(c).items()} for c in clients]} if counts_labels(task) else {}
    )

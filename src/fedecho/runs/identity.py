"""What identifies a run: its configuration, its inputs' digests and the software that computes it."""

import json
import mmap
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedecho.core.task import defines
from fedecho.core.types import Weights
from fedecho.runs.build import Simulation
from fedecho.runs.config import ConfigError, completed, differences, to_config
from fedecho.runs.experiment import Experiment, attributes, described
from fedecho.runs.record import RECORD, Line, Record, read_header
from fedecho.runs.record_schema import Header
from fedecho.runs.summary import SUMMARY
from fedecho.simulation.runtimes import ClientRuntimes
from fedecho.storage.files import arrays_sha256, file_sha256, source_sha256
from fedecho.storage.user_files import FileError
from fedecho.version import __version__

LIBRARIES = ("transformers", "tokenizers", "peft", "triton")
COMPARED = {
    "fedecho": "fedecho",
    "source": "source files of fedecho",
    "python": "Python",
    "torch": "torch",
    "numpy": "numpy",
    "cpu": "CPU capability",
    "gpu": "GPU",
    **{name: name for name in LIBRARIES},
}
"""What may change a number, and what it is called. The platform may not."""
DIGITS = 16
"""Of the digest: enough to tell any two edits apart, short enough to be read out."""
EVENT = "software"
BEGINS = f'\n{{"event":"{EVENT}",'.encode()


def software(**more: str) -> dict[str, str]:
    """Versions of all that may change a number; of some libraries, where they were used."""
    used = {name: sys.modules[name].__version__ for name in LIBRARIES if name in sys.modules}
    return {
        "fedecho": __version__,
        "source": source_sha256()[:DIGITS],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **used,
        "platform": platform.platform(),
        **more,
    }


def check_software(folder: Path, other_software: bool) -> None:
    """Is the run in ``folder`` computed by this very software? If not, it goes on only where ``other_software`` is allowed."""
    changed = _changed(_last_of(folder))
    if changed and not other_software:
        was, now = (", ".join(f"{COMPARED[name]} {both[of]}" for name, both in changed.items()) for of in (0, 1))
        raise ConfigError(
            f"{folder} was computed by {was}, and is now to go on with {now}, which may give another model: put the former back, "
            "start in another folder, or go on all the same with --other-software (other_software=True), which its record will say"
        )


def note_software(record: Record, folder: Path, say: Callable[[str], None]) -> None:
    """A line in the record, from which on it is of other software than before."""
    changed = _changed(_last_of(folder))
    if changed:
        more = {"gpu": changed["gpu"][1]} if "gpu" in changed else {}
        record.write({"event": EVENT, "software": software(**more)})
        record.flush()
        told = ", ".join(f"{COMPARED[name]} {now} in place of {was}" for name, (was, now) in changed.items())
        say(f"going on with other software: {told}")


def _changed(before: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By name: what it was and what it is. Records of before name less; a library may not be imported yet."""
    now, found = software(), {}
    for name in COMPARED:
        if name in before:
            is_now = now.get(name) or (_gpu() if name == "gpu" else _installed(name))
            was, here = _compared(name, str(before[name])), _compared(name, is_now)
            if was != here:
                found[name] = (was, here)
    return found


def _compared(name: str, text: str) -> str:
    """Python 3.12 adds floats otherwise than 3.11; its patches change no number."""
    return ".".join(text.split(".")[:2]) if name == "python" else text


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "(none)"


def _last_of(folder: Path) -> dict[str, Any]:
    """What the header says, or the last line since that says it anew. Of a record of gigabytes only that line is read."""
    header = read_header(folder)
    found, execution = header.get("software"), header["execution"]
    path = folder / RECORD
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        start = whole.rfind(BEGINS)
        if start >= 0 and (end := whole.find(b"\n", start + 1)) < 0:  # torn by a crash
            start = whole.rfind(BEGINS, 0, start)
            end = whole.find(b"\n", start + 1)
        if start >= 0:
            try:
                found = json.loads(whole[start:end])["software"]
            except (ValueError, KeyError, RecursionError):
                raise ValueError(f"{path} has a damaged line of software; start in a new folder") from None
    # Without any GPU the executor itself says that it needs one.
    gpu = {"gpu": execution["device"]} if "device" in execution and torch.cuda.is_available() else {}
    return gpu | found if isinstance(found, dict) else gpu


MODEL_FILES = "model files"
MOST_LISTED = 10_000
"""Above so many clients a header does not name each of them."""


def check_same(folder: Path, experiment: Experiment) -> None:
    """Is the run in ``folder`` one of this experiment? Of a user's own parts, the names and plain fields are compared."""
    header = read_header(folder)
    ours, theirs = config_of(experiment), header["config"]
    if ours is None or theirs is None:
        ours = {name: getattr(experiment, name) for name in ("name", "seed", "num_versions")}
        theirs = {name: value for name, value in header.items() if name in ours}
        parts = header.get("parts")
        if parts is not None:  # records of before have none
            ours, theirs = ours | described(experiment), theirs | parts
        known = header.get("attributes")
        if known is not None:  # a method keeps nothing on itself; a task may count, or keep what it has read
            ours, theirs = ours | _of_method(attributes(experiment)), theirs | _of_method(known)
    else:
        theirs = completed(theirs)
    found = differences(ours, theirs)
    if found:
        raise ConfigError(f"{folder} holds a run of another configuration: {'; '.join(found[:3])}")
    _check_model(folder, (header.get("notes") or {}).get(MODEL_FILES), experiment.task)
    _check_trace(folder, experiment, header)


def _of_method(found: Mapping[str, Any]) -> Line:
    return {name: value for name, value in found.items() if name.startswith("algorithm.")}


def _check_model(folder: Path, began_with: str | None, task: Any) -> None:
    """A folder of the same name may hold other weights by now."""
    files = _files_of(task).get(MODEL_FILES)
    if began_with is None or files is None:
        return
    if not files.startswith(str(began_with)):
        raise ConfigError(
            f"{folder} began with {task.model} of {began_with}, but its files are now {files}: "
            "put the former files back, or start in a new folder"
        )


def _check_trace(folder: Path, experiment: Experiment, header: Header) -> None:
    """The name of a trace stands in the configuration; what it holds decides the schedule."""
    before = header.get("trace_sha256")
    if before is not None and before != trace_digest(experiment):
        raise ConfigError(
            f"the trace {experiment.runtimes.trace} has changed since the run in {folder} began (its sha256 was {before[:12]}...): "
            "put the old one back, or start in a new folder"
        )


def check_inputs(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """A file of the same name may hold other data by now. Records of before name none."""
    for name, was in before.items():
        if now.get(name, "").split()[:1] != str(was).split()[:1]:
            raise ConfigError(
                f"{name} has changed since the run in {folder} began (its sha256 was {str(was)[:12]}...): "
                "put the old data back, or start in a new folder"
            )


def trace_digest(experiment: Experiment) -> str | None:
    trace = getattr(experiment.runtimes, "trace", None)
    if trace is None:
        return None
    try:
        return file_sha256(Path(trace))
    except FileError as error:
        raise ConfigError(f"cannot read the trace {trace}: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace {trace}: {error.strerror or error}") from None


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def model_digest(weights: Weights) -> str:
    return arrays_sha256([weights.params.cpu().numpy(), weights.buffers.cpu().numpy()])


def name_of(algorithm: Any) -> str:
    named = to_config(algorithm).get("name") if is_dataclass(algorithm) else None
    return str(named or type(algorithm).__name__)


def config_of(experiment: Experiment) -> Line | None:
    """The experiment as a table, or None if a part of it is a user's own and cannot be written down."""
    try:
        tree = to_config(experiment)
        return tree if completed(tree) == tree else None
    except (TypeError, ValueError):
        return None


def notes_of(task: Any) -> dict[str, str]:
    """What a task wants said beside its numbers: its model, its prompt, what stands in for what."""
    notes = getattr(task, "notes", None)
    told = {str(name): str(text) for name, text in notes.items()} if isinstance(notes, Mapping) else {}
    return told | _files_of(task)


def _files_of(task: Any) -> dict[str, str]:
    files = getattr(task, "model_files", None)
    return {MODEL_FILES: files} if isinstance(files, str) else {}


def parts_of(experiment: Experiment, config: Line | None) -> Line:
    """What a header says of an experiment in place of a configuration, where a part of it is a user's own."""
    if config is not None:
        return {"parts": None}
    return {"parts": described(experiment), "attributes": attributes(experiment)}


def header_of(simulation: Simulation, config: Line | None, execution: Line) -> Line:
    task, every = simulation.experiment.task, simulation.experiment.record_every or 1
    return {
        "format": 1,
        "name": simulation.experiment.name,
        "algorithm": name_of(simulation.experiment.algorithm),
        "config": config,
        **parts_of(simulation.experiment, config),
        "trace_sha256": trace_digest(simulation.experiment),
        "seed": simulation.experiment.seed,
        "num_versions": simulation.experiment.num_versions,
        "execution": execution,
        "software": software(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "num_params": simulation.layout.num_params,
        "num_unlabeled": task.num_unlabeled,
        "inputs": dict(simulation.inputs),
        "notes": notes_of(task),
        **({"record_every": every} if every > 1 else {}),
        "clients": _clients(task, simulation.runtimes),
    }


def _clients(task: Any, runtimes: ClientRuntimes) -> Line:
    """Client by client, or of very many how many there are of which kind."""
    everybody = range(task.num_clients)
    if len(everybody) <= MOST_LISTED:
        examples = [task.num_examples(client) for client in everybody]
        return {"examples": examples, "classes": [runtimes.class_of(client) for client in everybody], **_labels(task)}
    sizes = np.fromiter((task.num_examples(client) for client in everybody), np.int64, len(everybody))
    counts = getattr(getattr(runtimes, "classes", None), "counts", lambda: None)()
    spread = {f"{share}%": int(np.percentile(sizes, share)) for share in (0, 25, 50, 75, 100)}
    return {"num_clients": len(everybody), "num_examples": int(sizes.sum()), "examples_at": spread, "class_counts": counts}


def _labels(task: Any) -> Line:
    """Who holds which classes, of a task that says so."""
    if not defines(task, "label_counts"):
        return {}
    return {"labels": [{str(k): int(n) for k, n in task.label_counts(c).items()} for c in range(task.num_clients)]}

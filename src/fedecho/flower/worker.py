"""The persistent worker that serves a node's short-lived client processes, and the job that it runs."""

import argparse
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from secrets import randbits
from typing import Any

import torch
from flwr.app import RecordDict

from fedecho.core.types import ClientUpdate, Dispatch, Weights
from fedecho.flower.codec import Codec
from fedecho.flower.config import Settings
from fedecho.flower.wire import CONTROL, receive_frame, send_frame
from fedecho.learning.privacy import Privacy
from fedecho.learning.trainer import Trainer
from fedecho.runs.build import bound_network
from fedecho.runs.experiment import Experiment


class PrivateError(RuntimeError):
    """A job failed on a client with private reports; the message names only the type of the error."""


def experiment_of(reference: str, run_config: Mapping[str, Any]) -> Experiment:
    """The experiment that ``module:function`` makes from the app's configuration."""
    module, _, name = reference.partition(":")
    experiment = getattr(import_module(module), name)(run_config)
    if not isinstance(experiment, Experiment):
        raise TypeError(f"{reference} must return an Experiment, got {type(experiment).__name__}")
    return experiment


def work(
    reference: str, run_config: Mapping[str, Any], content: RecordDict, state: RecordDict
) -> tuple[RecordDict, RecordDict]:
    """Train on a dispatch. Returns the answer and the client's new state (its control variate c_i, if the method has one)."""
    trainer, codec, privacy = _loaded(reference, json.dumps(dict(run_config), sort_keys=True))
    dispatch = codec.read_dispatch(content)
    if not 0 <= dispatch.client < trainer.task.num_clients:
        raise ValueError(f"client {dispatch.client} does not exist: the task has clients 0 to {trainer.task.num_clients - 1}")
    control = codec.read_control(state)
    try:
        update = trainer.train(dispatch, control)
    except Exception as error:
        if privacy is None:
            raise
        raise PrivateError(f"{type(error).__name__} (the message may quote data and is not sent)") from None
    answer = (
        _private(update, dispatch, codec, privacy) if privacy is not None else codec.answer(update, trainer.network.weights)
    )
    if update.correction is not None:
        moved = update.correction if control is None else control + update.correction
        state = RecordDict({CONTROL: codec.control(moved)})
    return answer, state


def _private(update: ClientUpdate, dispatch: Dispatch, codec: Codec, privacy: Privacy) -> RecordDict:
    """Clip and noise the update. The noise has a secret seed, since a seed known to the server would undo it."""
    base = dispatch.model.weights
    sent = privacy.sent(update, dispatch.model, randbits(62), codec.layout.variances(base.params.device))
    return codec.answer(sent, Weights(base.params + sent.delta, sent.buffers))


@lru_cache(maxsize=1)
def _loaded(reference: str, run_config: str) -> tuple[Trainer, Codec, Privacy | None]:
    """Load the model and data of an app; they are kept for the next job."""
    settings = json.loads(run_config)
    if threads := Settings.of(settings).threads:
        torch.set_num_threads(threads)
    experiment = experiment_of(reference, settings)
    network = bound_network(experiment.task, experiment.seed)
    is_private = experiment.privacy.on and experiment.privacy.where == "client"
    trainer = Trainer(experiment.task, experiment.local_training, network)
    return trainer, Codec(network.layout), experiment.privacy if is_private else None


IDLE_S = 1800.0
WATCH_S = 0.5


def serve(path: Path, owner: int, idle_s: float = IDLE_S) -> None:
    """Serve jobs one at a time until none has come for ``idle_s`` seconds or ``owner`` exits."""
    threading.Thread(target=_exit_with, args=(owner, path), daemon=True).start()
    with _listen(path) as listener:
        listener.settimeout(idle_s)
        try:
            _serve_connections(listener)
        finally:
            _remove(path)


def _serve_connections(listener: socket.socket) -> None:
    while True:
        try:
            link, _ = listener.accept()
        except TimeoutError:
            return
        with link, contextlib.suppress(ConnectionError):
            link.settimeout(None)
            answer_one(link)


def answer_one(link: socket.socket) -> None:
    """Run one job and send its result, or the error if it fails."""
    note, contents = receive_frame(link)
    try:
        answer, state = work(note["reference"], note["run_config"], *contents)
    except Exception as error:  # a custom task may raise anything
        send_frame(link, {"error": f"{type(error).__name__}: {error}"})
        return
    send_frame(link, {}, answer, state)


def _listen(path: Path) -> socket.socket:
    """Bind under a temporary name and rename, so that the socket accepts connections as soon as it is visible."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    hidden = path.with_suffix(f".{os.getpid()}")
    before = os.umask(0o177)
    try:
        listener.bind(str(hidden))
    finally:
        os.umask(before)
    listener.listen(4)
    hidden.rename(path)
    return listener


def _exit_with(owner: int, path: Path) -> None:
    started = start_time_of(owner)
    while started is not None and start_time_of(owner) == started:
        time.sleep(WATCH_S)
    _remove(path)
    os._exit(0)


def start_time_of(pid: int) -> str | None:
    """The start time of a process, to detect a reused process id; None if no such process exists."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        pass
    if Path("/proc/self").exists():
        return None
    try:
        os.kill(pid, 0)  # macOS has no /proc: only check that the process exists
    except OSError:
        return None
    return "alive"


def _remove(path: Path) -> None:
    for file in (path, path.with_suffix(".log")):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", type=Path)
    parser.add_argument("owner", type=int, help="id of the process with which this worker exits")
    arguments = parser.parse_args()
    serve(arguments.socket, arguments.owner)


if __name__ == "__main__":
    main()

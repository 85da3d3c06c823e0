"""The persistent worker behind a node's short-lived client processes, and the job it computes."""

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


IDLE_S = 1800.0
WATCH_S = 0.5


def serve(path: Path, owner: int, idle_s: float = IDLE_S) -> None:
    """One job after another, until nobody asks any more."""
    threading.Thread(target=_end_with, args=(owner, path), daemon=True).start()
    with _listen(path) as listener:
        listener.settimeout(idle_s)
        try:
            _answer_all(listener)
        finally:
            _remove(path)


def _answer_all(listener: socket.socket) -> None:
    while True:
        try:
            link, _ = listener.accept()
        except TimeoutError:
            return
        with link, contextlib.suppress(ConnectionError):
            link.settimeout(None)
            answer_one(link)


def answer_one(link: socket.socket) -> None:
    """A failed job is an answer too; the worker goes on."""
    note, contents = receive_frame(link)
    try:
        answer, state = work(note["reference"], note["run_config"], *contents)
    except Exception as error:  # whatever a user's task raises
        send_frame(link, {"error": f"{type(error).__name__}: {error}"})
        return
    send_frame(link, {}, answer, state)


def _listen(path: Path) -> socket.socket:
    """Bound under another name and renamed: a socket that can be seen can be connected to."""
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


def _end_with(owner: int, path: Path) -> None:
    born = birth(owner)
    while born is not None and birth(owner) == born:
        time.sleep(WATCH_S)
    _remove(path)
    os._exit(0)


def birth(pid: int) -> str | None:
    """When a process started, so that another one under the same number is told apart; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        pass
    if Path("/proc/self").exists():
        return None
    try:
        os.kill(pid, 0)  # no /proc here (macOS): its existence must do
    except OSError:
        return None
    return "alive"


def _remove(path: Path) -> None:
    for left in (path, path.with_suffix(".log")):
        with contextlib.suppress(FileNotFoundError):
            left.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", type=Path)
    parser.add_argument("owner", type=int, help="the process that this worker ends with")
    told = parser.parse_args()
    serve(told.socket, told.owner)


if __name__ == "__main__":
    main()

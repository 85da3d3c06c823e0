"""The client of a deployment: a Flower ``ClientApp`` that passes its jobs to a persistent worker."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedecho.flower.config import Settings, in_simulation, pause_of
from fedecho.flower.wire import CONTROL, check_addressee, introduction, partition_of, receive_frame, send_frame

START_S = 120.0
"""Start-up timeout of a worker. It imports torch, possibly on a busy machine."""


class WorkerFailedError(RuntimeError):
    """A job failed in the worker, or the worker did not start."""


def socket_folder() -> Path:
    """A folder that only the current user can enter: whoever can connect could train on this node's data."""
    folder = Path(tempfile.gettempdir()) / f"fedecho-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise PermissionError(f"{folder} must be a folder that only its owner may enter (mode 700): remove it and try again")
    return folder


def socket_path(owner: int, reference: str) -> Path:
    """The socket of the worker for a node (the process that starts clients) and an app (its code on ``sys.path``)."""
    identity = json.dumps([owner, reference, sys.path, sys.executable])
    return socket_folder() / f"{sha256(identity.encode()).hexdigest()[:24]}.sock"


def work_in_worker(
    reference: str, run_config: Mapping[str, Any], content: RecordDict, state: RecordDict
) -> tuple[RecordDict, RecordDict]:
    """Run ``worker.work`` in this node's persistent worker."""
    path = socket_path(os.getppid(), reference)
    with _connect(path, os.getppid()) as link:
        send_frame(link, {"reference": reference, "run_config": dict(run_config)}, content, state)
        note, contents = receive_frame(link)
    if "error" in note:
        raise WorkerFailedError(note["error"])
    answer, state = contents
    return answer, state


def _connect(path: Path, owner: int) -> socket.socket:
    link = _try_connect(path)
    if link is not None:
        return link
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # left over from a killed worker
    process = start_worker(path, owner)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        link = _try_connect(path)
        if link is not None:
            return link
        if process.poll() is not None:
            raise WorkerFailedError(f"the worker exited with code {process.returncode}; see {path.with_suffix('.log')}")
        time.sleep(0.02)
    process.kill()
    raise WorkerFailedError(f"the worker did not start within {START_S:.0f} s; see {path.with_suffix('.log')}")


def start_worker(path: Path, owner: int) -> subprocess.Popen[bytes]:
    """Start a detached worker. It outlives this process, watches ``owner`` and exits with it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        process = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-m", "fedecho.flower.worker", str(path), str(owner)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    threading.Thread(target=process.wait, daemon=True).start()  # reaps the worker if it exits first
    return process


def _try_connect(path: Path) -> socket.socket | None:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        link.close()
        return None
    return link


FROM_RUN_CONFIG = "fedecho.flower.config:experiment"


def make_client_app(experiment: str = FROM_RUN_CONFIG) -> ClientApp:
    """Make the ``ClientApp`` of an experiment.

    ``experiment`` names a function as ``module:function``, which turns the app's configuration into an ``Experiment``. Only the
    worker imports it. With ``worker = false`` in the app's configuration, and always in Flower's simulation engine, jobs run in
    Flower's own process instead. ``pause-s`` in a node's configuration delays each job, to try out slow clients.
    """
    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return Message(introduction(partition_of(context.node_config)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(train_content(experiment, message.content, context), reply_to=message)

    return app


def train_content(experiment: str, content: RecordDict, context: Context) -> RecordDict:
    """Train on a dispatch and return the answer. The client's control variate is kept in ``context``."""
    check_addressee(content, context.node_config)
    settings = Settings.of(context.run_config)
    time.sleep(pause_of(context.node_config))
    memory = RecordDict({CONTROL: context.state.array_records[CONTROL]} if CONTROL in context.state.array_records else {})
    if settings.worker and not in_simulation():
        answer, memory = work_in_worker(experiment, context.run_config, content, memory)
    else:
        from fedecho.flower.worker import work

        answer, memory = work(experiment, context.run_config, content, memory)
    if CONTROL in memory.array_records:
        context.state[CONTROL] = memory.array_records[CONTROL]
    return answer


app = make_client_app()

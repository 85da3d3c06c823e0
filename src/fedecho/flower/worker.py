"""The persistent worker behind the short-lived client processes of a node: model and data stay loaded between messages.

``python -m fedecho.flower.worker SOCKET PID`` serves jobs on a Unix socket and ends when process PID (the node) does, or after
an idle spell.
"""

import argparse
import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from fedecho.flower.frames import receive_frame, send_frame
from fedecho.flower.job import work

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

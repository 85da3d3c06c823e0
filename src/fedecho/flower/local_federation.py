"""A federation of real processes on one machine, for trials and tests."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fedecho.flower.launch import Control, LaunchError, Tls, environment, superlink, supernode
from fedecho.storage.files import make_private

START_S = 60.0


class LocalFederation:
    """A SuperLink and its SuperNodes on the loopback interface. Their logs are written to ``folder``.

    With ``simulation`` it runs apps on Flower's simulation engine (Ray), and no node can join.
    """

    def __init__(self, folder: Path, tls: Tls | None = None, authenticate: bool = False, simulation: bool = False) -> None:
        self.folder = folder
        self.tls = tls or Tls()
        self.authenticate = authenticate
        self.simulation = simulation
        self.port = free_port()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._link: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> "LocalFederation":
        make_private(self.folder)
        words = superlink("127.0.0.1", self.port, self.tls, self.authenticate, simulation=self.simulation)
        self._link = self._start("superlink", words)
        deadline = time.monotonic() + START_S
        while not _listening(self.port):
            if self._link.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise LaunchError(f"the SuperLink did not start; see {self.folder / 'superlink.log'}")
            time.sleep(0.05)
        self.control = Control.to(self.address, self.tls, self.folder / "control")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start_node(
        self, client: int, settings: Mapping[str, Any] | None = None, private_key: Path | None = None, name: str | None = None
    ) -> None:
        words = supernode(self.address, client, self.tls, port=free_port(), private_key=private_key, settings=settings)
        name = name or f"node{client}"
        self.nodes[name] = self._start(name, words)

    def kill_node(self, name: str) -> None:
        """Send SIGKILL, like a power failure. The node's own processes notice and exit."""
        process = self.nodes.pop(name)
        process.kill()
        process.wait()

    def kill_superlink(self) -> None:
        """Send SIGKILL. ``close`` reaps the process; until then it remains a zombie."""
        if self._link is not None:
            self._link.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop all processes."""
        processes = [*self.nodes.values(), *([self._link] if self._link else [])]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.nodes.clear()

    def _start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        """Start a process in its own session, to stop its children with it, and with its own Flower home."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                words,
                env=environment(self.folder / "home" / name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""Flower's programs with hardened defaults: TLS unless told otherwise, no telemetry, no installations, true exit codes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedecho.flower.key_values import as_words

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
}
"""Nothing is sent home, nothing is installed, and a message waits a quarter of a second for its process, not a whole one."""

DONE, FAILED = "finished:completed", ("finished:failed", "finished:stopped")


MOST_FAILURES = 5
"""In a row, of asking how a run is."""


class LaunchError(ValueError):
    """A user's mistake, or what Flower could not do, said in one line."""


class RunFailedError(RuntimeError):
    """A run that was started did not come to its end."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """``None`` everywhere is ``--insecure``, which must be asked for."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def checked(cls, insecure: bool, **paths: Path | None) -> "Tls":
        """The files, or a reason why not."""
        if insecure:
            return cls()
        for name, path in paths.items():
            if path is None:
                raise LaunchError(f"--{name} is missing: give it, or --insecure on a network you trust (docs/deployment.md)")
            if not path.is_file():
                raise LaunchError(f"--{name}: there is no file {path}")
        return cls(**{name: path.absolute() for name, path in paths.items() if path is not None})


def environment(home: Path | None = None) -> dict[str, str]:
    """For every Flower program we start. Those start others by name, so ours come first in the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    told = os.environ | QUIET | {"PATH": path}
    return told if home is None else told | {"FLWR_HOME": str(home)}


def superlink(
    host: str, port: int, tls: Tls, authenticate: bool = False, database: Path | None = None, simulation: bool = False
) -> list[str]:
    """The server side. Without TLS there is no authentication of nodes: Flower refuses it."""
    words = ["flower-superlink", "--host", host, "--port", str(port)]
    if tls.ca is None:
        words += ["--insecure"]
    else:
        words += ["--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key)]
    words += ["--enable-supernode-auth"] if authenticate else []
    words += ["--simulation"] if simulation else []
    return words + (["--database", str(database)] if database else [])


def supernode(
    address: str,
    client: int,
    tls: Tls,
    *,
    port: int,
    private_key: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """One client. ``port`` is local, for the node's own processes."""
    told = {"partition-id": client, **(settings or {})}
    words = ["flower-supernode", "--superlink", address, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--node-config", as_words("--node-config", told)]
    words += ["--insecure"] if tls.ca is None else ["--root-certificates", str(tls.ca)]
    return words + (["--auth-supernode-private-key", str(private_key)] if private_key else [])


@dataclass(frozen=True)
class Control:
    """``flwr`` against one SuperLink. It can fail and exit with 0, so its JSON is read."""

    home: Path
    name: str = "deployment"

    @classmethod
    def to(cls, address: str, tls: Tls, home: Path | None = None) -> "Control":
        home = home or Path(tempfile.mkdtemp(prefix="fedecho-flwr-"))
        home.mkdir(parents=True, exist_ok=True)
        link: dict[str, Any] = {"address": address}
        link |= {"insecure": True} if tls.ca is None else {"root-certificates": str(tls.ca)}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": cls.name, cls.name: link}}))
        return cls(home)

    def submit(self, app: Path, run_config: Mapping[str, Any] | None = None, options: Sequence[str] = ()) -> str:
        """Start a run; its id."""
        words = ["run", str(app), self.name, *options]
        if run_config:
            told = self.home / "run-config.toml"
            told.write_text(tomli_w.dumps(dict(run_config)))
            words += ["--run-config", str(told)]
        return str(self._flwr(*words)["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """Such as ``running`` or ``finished:failed``, and what Flower says of it."""
        (found,) = self._flwr("list", self.name, "--run-id", run)["runs"]
        return str(found["status"]), str(found["status-details"])

    def register(self, public_key: Path) -> None:
        """Let a node's key in; before the node starts."""
        self._flwr("supernode", "register", str(public_key), self.name)

    def stop(self, run: str) -> None:
        self._flwr("stop", run, self.name)

    def follow(self, run: str, every_s: float = 3.0, see: Callable[[str], None] = lambda status: None) -> None:
        """Wait for the end; a run that failed is an error."""
        failures = 0
        while True:
            try:
                status, details = self.status(run)
            except LaunchError:  # a SuperLink may be busy for a moment; the run goes on meanwhile
                failures += 1
                if failures >= MOST_FAILURES:
                    raise
                time.sleep(every_s)
                continue
            failures = 0
            see(status)
            if status == DONE:
                return
            if status in FAILED:
                raise RunFailedError(
                    f"run {run} is {status}: {details or 'flwr log has more'} (a stopped run goes on when it is submitted again)"
                )
            time.sleep(every_s)

    def _flwr(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(  # noqa: S603
            [str(Path(sys.executable).parent / "flwr"), *words, "--format", "json"],
            env=environment(self.home),
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            raise LaunchError(f"flwr {words[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}") from None
        if done.returncode or not answer.get("success"):
            raise LaunchError(f"flwr {words[0]} failed: {answer.get('error-message') or answer}")
        return answer

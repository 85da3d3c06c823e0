"""Real federations on the loopback interface, for tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedecho import simulate
from fedecho.flower.launch import CA, CERTIFICATE, KEY, Tls, environment, make_certificates, make_node_keys
from fedecho.flower.local_federation import LocalFederation
from fedecho.runs.config import from_config
from fedecho.runs.record import read_header, read_record

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "flower-digits"
APPS = Path(__file__).parent / "apps"
CHAOS = APPS / "chaos"


def lines(run: Path, event: str) -> list[dict[str, Any]]:
    if not (run / "run.jsonl").exists():
        return []
    return [line for line in read_record(run) if line["event"] == event]


def arrivals(run: Path, status: str = "accepted") -> list[dict[str, Any]]:
    return [line for line in lines(run, "arrival") if line["status"] == status]


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def secured(folder: Path, number: int) -> tuple[Tls, list[Path]]:
    """Files for TLS, and the public keys of nodes."""
    make_certificates(folder, ["127.0.0.1", "localhost"])
    return Tls(ca=folder / CA, certificate=folder / CERTIFICATE, key=folder / KEY), make_node_keys(folder, number)


def server_processes(federation: LocalFederation) -> list[int]:
    """The ServerApps of this SuperLink, by the address in their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "flwr-serverapp" in words and f":{federation.port}\0" in words:
            found.append(int(folder.name))
    return found


def kill_server_app(federation: LocalFederation) -> None:
    for process in server_processes(federation):
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: not server_processes(federation), 10, "the ServerApp is gone")


def log_of(federation: LocalFederation, run: str) -> str:
    """What the ServerApp said, as ``flwr log`` shows it."""
    control = federation.control
    words = [str(Path(sys.executable).parent / "flwr"), "log", run, control.name, "--show"]
    done = subprocess.run(words, env=environment(control.home), capture_output=True, text=True, timeout=60, check=True)
    return done.stdout + done.stderr


def simulated_mean(run: Path, seeds: range) -> float:
    """The simulator's accuracy on the experiment of a deployed run."""
    config = json.loads(json.dumps(read_header(run)["config"]))
    scores = []
    for seed in seeds:
        told = config | {"seed": seed, "task": config["task"] | {"seed": seed}}
        told["algorithm"] = {key: value for key, value in config["algorithm"].items() if key != "seed"}
        scores.append(simulate(from_config(told)).accuracy)
    return sum(scores) / len(scores)

"""The peers, and how each is run: in its own environment and process."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.install import ROOT, python_of
from benchmarks.peers.job import Job, changed
from benchmarks.peers.memory import Watch, end
from benchmarks.peers.mps import NoMpsError, mps
from benchmarks.peers.tally import FOLDER, WARM, heard, steps_in


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A runner with the options it is given."""

    name: str
    runner: str
    peer: str = ""
    """Whose environment; without one it is ours."""
    options: str = ""
    workers: int = 1
    times: float = 1.0
    """How many times as many updates: fewer for the slowest, more for one that is over before it can be measured."""

    slow: bool = False
    """Runs in the first turn and the watched one only."""

    mps: bool = False
    """Its processes share the GPU by NVIDIA's MPS server."""

    @property
    def compiles(self) -> bool:
        return "compiled" in self.options

    def on(self, job: Job) -> Job:
        rounded = max(job.concurrency, round(job.num_updates * self.times / job.concurrency) * job.concurrency)
        return changed(
            job, options=self.options, workers=self.workers, num_updates=rounded if self.times != 1 else job.num_updates
        )

    @property
    def command(self) -> list[str]:
        python = str(python_of(self.peer)) if self.peer else sys.executable
        if self.runner == "with_pfl" and self.workers > 1:
            return [
                python,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={self.workers}",
                "-m",
                f"benchmarks.peers.{self.runner}",
            ]
        return [python, "-m", f"benchmarks.peers.{self.runner}"]


CONTENDERS = [
    Contender(name="bare loop", runner="bare"),
    Contender(name="bare loop, 2 processes", runner="bare", workers=2),
    Contender(name="bare loop, heap kept", runner="bare", options="heap"),
    Contender(name="ours, serial", runner="ours"),
    Contender(name="ours, pool of 2", runner="ours", workers=2),
    Contender(name="pfl", runner="with_pfl", peer="pfl"),
    Contender(name="pfl, 2 processes", runner="with_pfl", peer="pfl", workers=2),
    Contender(name="FLGo", runner="with_flgo", peer="flgo"),
    Contender(name="APPFL", runner="with_appfl", peer="appfl"),
    Contender(name="APPFL, default memory setting", runner="with_appfl", peer="appfl", options="default", times=0.1, slow=True),
    Contender(name="Flower, 2 workers", runner="with_flower", peer="flower", workers=2),
    Contender(name="NVFlare, 10 processes", runner="with_nvflare", peer="nvflare", workers=10, times=0.5, slow=True),
]


def run(contender: Contender, job: Job, limit_s: float, *, watched: bool = False) -> dict[str, Any]:
    """What it told, with its steps and times, or why it told nothing. Times of a watched run are not to be used."""
    job = contender.on(job)
    if not Path(contender.command[0]).exists():
        told = f"{contender.peer} is not installed: python -m benchmarks.peers.install {contender.peer}"
        return {"name": contender.name, "error": told, "stderr": ""}
    try:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder, mps() if contender.mps else nullcontext({}) as served:
            return {"name": contender.name} | _ran(contender.command, job, limit_s, folder, served, watched)
    except NoMpsError as error:
        return {"name": contender.name, "error": str(error), "stderr": ""}


def _ran(command: list[str], job: Job, limit_s: float, folder: str, served: dict[str, str], watched: bool) -> dict[str, Any]:
    watch = Watch(folder) if watched else None
    began = time.time()
    try:
        done = subprocess.run(
            [*command, job.to_json()],
            env=environment(folder, job) | served,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            cwd=folder,
        )
        told, stderr = heard(done.stdout), done.stderr
    except subprocess.TimeoutExpired:
        told, stderr = None, f"not done within {limit_s:.0f} s"
    total_s = time.time() - began
    peak = None if watch is None else watch.stop()
    end(folder)
    if told is None:
        return {"error": last_words(stderr), "stderr": stderr[-4000:]}
    return {"total_s": total_s, "peak_bytes": peak, **told, **measured(told, Path(folder), job)}


def environment(folder: str, job: Job) -> dict[str, str]:
    """Relative parts of PYTHONPATH are those of this folder, and a runner may go elsewhere."""
    parts = [str(ROOT), str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = os.pathsep.join(str(Path(part).absolute()) for part in parts if part)
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return os.environ | quiet | {"PYTHONPATH": path, FOLDER: folder, WARM: str(job.num_local_steps)}


def measured(told: dict[str, Any], folder: Path, job: Job) -> dict[str, Any]:
    """Steps that were made, whether anybody used them or not, and seconds since the first began."""
    if "seconds" in told:  # it has measured itself
        return {"images_per_s": told["steps"] * job.batch_size / told["seconds"]}
    steps = steps_in(folder, job.num_local_steps)
    found: dict[str, Any] = {"steps": steps.count, "used_steps": told["updates"] * job.num_local_steps}
    found |= {"run_s": told["ended"] - steps.first, "cpu_s": steps.cpu_s}
    if steps.warm:
        found["images_per_s"] = steps.per_s(told["ended"]) * job.batch_size
    return found


def last_words(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"

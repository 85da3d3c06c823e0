"""The race on a GPU: images per second of ResNet-18 training at batch 50, ours beside bare loops and the peers that import.

    python -m benchmarks.peers.gpu [--out FILE.json] [--updates 50] [--limit 60] [--only NAME ...] [--device cpu --steps 3]

Each runs in a process of its own, one after another; one that fails or takes too long is said so, and the next begins. Peers of
pure Python may lie unpacked in a folder on PYTHONPATH. The first update of each is a warm-up and not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.job import JOBS, Job, changed
from benchmarks.peers.tally import FOLDER, WARM, heard, steps_in

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Contender:
    """A runner with the options it is given."""

    name: str
    runner: str
    options: str = ""
    workers: int = 1
    times: int = 1
    """How many times as many updates: a fast one would be over before it can be measured."""

    @property
    def compiles(self) -> bool:
        return self.runner == "ours" or "compiled" in self.options


CONTENDERS = [
    Contender("bare loop, eager, fp32 (TF32 convolutions)", "bare"),
    Contender("bare loop, eager, bf16 channels-last", "bare", "bf16"),
    Contender("bare loop, torch.compile, bf16 channels-last", "bare", "bf16 compiled", times=2),
    Contender("pfl", "with_pfl"),
    Contender("pfl, amp bf16", "with_pfl", "bf16"),
    Contender("pfl, amp bf16, use_torch_compile", "with_pfl", "bf16 compiled"),
    Contender("FLGo", "with_flgo"),
    Contender("APPFL", "with_appfl"),
    Contender("APPFL, default memory setting", "with_appfl", "default"),
    Contender("ours, --executor cuda, 1 client at once", "ours", workers=1, times=4),
    Contender("ours, --executor cuda, 6 clients at once", "ours", workers=6, times=8),
]


def run(contender: Contender, job: Job, limit_s: float) -> dict[str, Any]:
    """One contender in its process; what it told, with its rate, or why there is none."""
    job = changed(job, options=contender.options, workers=contender.workers, num_updates=job.num_updates * contender.times)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {FOLDER: folder, WARM: str(job.num_local_steps)}
        # Paths of PYTHONPATH that are relative are those of this folder, and a runner may go elsewhere.
        parts = [str(ROOT), str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in parts if part)
        command = [sys.executable, "-m", f"benchmarks.peers.{contender.runner}", job.to_json()]
        began = time.time()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return {"name": contender.name, "error": f"not done within {limit_s:.0f} s"}
        told = heard(done.stdout)
        if told is None:
            return {"name": contender.name, "error": last_words(done.stderr), "stderr": done.stderr[-4000:]}
        return {"name": contender.name, "total_s": time.time() - began, **told, **rate(told, Path(folder), job)}


def rate(told: dict[str, Any], folder: Path, job: Job) -> dict[str, Any]:
    """Images per second; by the steps that were made, whether anybody used them or not."""
    if "seconds" in told:
        return {"images_per_s": told["steps"] * job.batch_size / told["seconds"]}
    steps = steps_in(folder)
    measured = steps.count - job.num_local_steps
    return {"steps": steps.count, "images_per_s": measured * job.batch_size / (told["ended"] - steps.warmed)}


def last_words(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--steps", type=int, help="local steps, each on a batch of its own (40, two passes over 20 batches)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one; three times as many for those that compile")
    parser.add_argument("--only", nargs="*", help="runners: bare, with_pfl, with_flgo, with_appfl, ours")
    options = parser.parse_args()
    job = changed(JOBS["gpu"], device=options.device, num_updates=options.updates)
    if options.steps is not None:
        job = changed(job, num_local_steps=options.steps, num_examples=options.steps * job.batch_size)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{machine}, torch {torch.__version__}, ResNet-18, batch {job.batch_size}, {job.num_local_steps} local steps",
        flush=True,
    )
    results = []
    for contender in CONTENDERS:
        if options.only and contender.runner not in options.only:
            continue
        result = run(contender, job, options.limit * (3 if contender.compiles else 1))
        said = f"{result['images_per_s']:>8,.0f} images/s" if "images_per_s" in result else f"no figure: {result['error']}"
        print(f"{contender.name:<48} {said}", flush=True)
        results.append(result)
        if options.out is not None:
            told = {"machine": machine, "torch": torch.__version__, "job": json.loads(job.to_json()), "results": results}
            options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

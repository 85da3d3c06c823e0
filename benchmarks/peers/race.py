"""The race on a CPU: the same job on this library, on the peers and in a bare loop, one after another.

    python -m benchmarks.peers.install
    python -m benchmarks.peers.race [cnn resnet18 overhead] [--repeats 5] [--out results/peers/cpu.json]
    python -m benchmarks.peers.table

Contenders take turns, each turn beginning with another one, and each turn's bare loop is the floor of that turn, so that a machine
that grows busy hurts all alike. The slowest two run in the first turn alone. Memory is watched in a last turn whose times are not
used. What fails or takes too long is said so, and the others go on; the file is written after every turn.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least_one, positive
from benchmarks.peers.contenders import CONTENDERS, Contender, run
from benchmarks.peers.install import ROOT
from benchmarks.peers.job import JOBS

CPU_JOBS = ("cnn", "resnet18", "overhead")
RESULTS = ROOT / "results" / "peers" / "cpu.json"


def race(name: str, contenders: list[Contender], repeats: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """One job; what there is of it after each turn. The first of a turn is another one each time: what ran before may matter."""
    turns: list[list[dict[str, Any]]] = []
    gone: set[str] = set()
    for turn in range(repeats + 1):
        turns.append([])
        first = turn % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            if contender.name in gone or (contender.slow and 0 < turn < repeats):
                continue
            result = run(contender, JOBS[name], limit_s, watched=turn == repeats)
            turns[-1].append(result)
            if "error" in result:
                gone.add(contender.name)
            print(f"{name}, turn {turn + 1} of {repeats + 1}: {contender.name:<32} {told(result)}", flush=True)
        yield {"job": asdict(JOBS[name]), "turns": turns[:repeats], "watched": turns[-1] if turn == repeats else []}


def told(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"no figure: {result['error']}"
    memory = "" if result["peak_bytes"] is None else f", {result['peak_bytes'] / 1e6:,.0f} MB"
    wasted = result["steps"] - result["used_steps"]
    times = f"{result['run_s']:7.2f} s of {result['total_s']:7.2f} s, {result['cpu_s']:.2f} s of CPU"
    return f"{times}, {result['steps']} steps, {wasted} for nothing{memory}"


def machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=f"all by default: {', '.join(CPU_JOBS)}")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--limit", type=positive, default=600.0, help="seconds for one run")
    runners = sorted({one.runner for one in CONTENDERS})
    parser.add_argument("--only", nargs="*", choices=runners, help=f"of {', '.join(runners)}; the bare loop is always there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    unknown = sorted(set(options.jobs) - set(CPU_JOBS))
    if unknown:
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(CPU_JOBS)}")
    chosen = [one for one in CONTENDERS if not options.only or one.runner in ("bare", *options.only)]
    found = json.loads(options.out.read_text()) if options.out.exists() else {"jobs": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.jobs or CPU_JOBS:
        known = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, **machine()}
        known["load_before"] = round(os.getloadavg()[0], 1)
        for result in race(name, chosen, options.repeats, options.limit):
            found["jobs"][name] = known | result
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The race on a GPU: images per second of ResNet-18 training at batch 50, ours beside bare loops and the peers that import.

    python -m benchmarks.peers.gpu [--out FILE.json] [--updates 50] [--limit 90] [--only RUNNER ...] [--first N]

Each runs in a process of its own, one after another; one that fails or takes too long is said so, and the next begins. Peers of
pure Python may lie unpacked in a folder on PYTHONPATH. The first update of each is a warm-up and not counted.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.arguments import at_least_one, need_gpu, positive
from benchmarks.peers.contenders import Contender, run
from benchmarks.peers.job import JOBS, changed

CONTENDERS = [
    Contender(name="bare loop, eager, fp32 (TF32 convolutions)", runner="bare", times=0.4),
    Contender(name="ours, --executor cuda (bf16, compiled, graphs), 1 client at once", runner="ours", workers=1, times=4),
    Contender(name="ours, --executor cuda (bf16, compiled, graphs), 6 clients at once", runner="ours", workers=6, times=8),
    Contender(name="pfl", runner="with_pfl", times=0.4),
    Contender(name="pfl, 5 processes", runner="with_pfl", workers=5, times=2),
    Contender(name="pfl, 5 processes, MPS", runner="with_pfl", workers=5, times=2, mps=True),
    Contender(name="bare loop, eager, fp32, 5 processes, MPS", runner="bare", workers=5, times=2, mps=True),
    Contender(
        name="pfl, amp bf16, use_torch_compile, 5 processes, MPS",
        runner="with_pfl",
        options="bf16 compiled",
        workers=5,
        times=2,
        mps=True,
    ),
    Contender(name="FLGo", runner="with_flgo", times=0.2),
    Contender(name="APPFL", runner="with_appfl", times=0.2),
    Contender(name="pfl, 3 processes", runner="with_pfl", workers=3),
    Contender(name="pfl, amp bf16", runner="with_pfl", options="bf16", times=0.4),
    Contender(name="pfl, amp bf16, use_torch_compile", runner="with_pfl", options="bf16 compiled"),
    Contender(name="bare loop, eager, bf16 channels-last", runner="bare", options="bf16", times=0.4),
    Contender(name="bare loop, torch.compile, bf16 channels-last", runner="bare", options="bf16 compiled"),
    Contender(name="APPFL, default memory setting", runner="with_appfl", options="default", times=0.2),
]
"""The most telling first, so that a race which is cut short has told the most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--updates", type=at_least_one, default=50)
    parser.add_argument(
        "--steps", type=at_least_one, help="local steps, each on a batch of its own (40, two passes over 20 batches)"
    )
    parser.add_argument(
        "--limit", type=positive, default=90.0, help="seconds for one; three times as many for those that compile"
    )
    parser.add_argument("--only", nargs="*", help="runners: bare, with_pfl, with_flgo, with_appfl, ours")
    parser.add_argument("--first", type=at_least_one, default=len(CONTENDERS), help="so many contenders of the list")
    options = parser.parse_args()
    if options.device == "cuda":
        need_gpu(parser)
    job = changed(JOBS["gpu"], device=options.device, num_updates=options.updates)
    if options.steps is not None:
        job = changed(job, num_local_steps=options.steps, num_examples=options.steps * job.batch_size)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{machine}, torch {torch.__version__}, ResNet-18, batch {job.batch_size}, {job.num_local_steps} local steps",
        flush=True,
    )
    results = []
    for contender in CONTENDERS[: options.first]:
        if options.only and contender.runner not in options.only:
            continue
        result = run(contender, job, options.limit * (3 if contender.compiles or contender.runner == "ours" else 1))
        result["num_updates"] = contender.on(job).num_updates
        said = f"{result['images_per_s']:>8,.0f} images/s" if "images_per_s" in result else f"no figure: {result['error']}"
        print(f"{contender.name:<48} {said}", flush=True)
        results.append(result)
        if options.out is not None:
            told = {"machine": machine, "torch": torch.__version__, "job": json.loads(job.to_json()), "results": results}
            options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

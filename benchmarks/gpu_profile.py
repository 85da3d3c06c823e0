"""Profile a captured SGD step on a GPU, find the best number of streams, and time the server's work.

    python -m benchmarks.gpu_profile [--streams 1 6 8 12] [--seconds 1.5]

Needs CUDA. A kernel that has fewer blocks than the card has multiprocessors leaves room for other streams' kernels, so its time
is also weighed by the share of the card that its blocks take: streams cannot bring a step below the sum of these.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import at_least_one, need_gpu, positive
from benchmarks.gpu_steps import NoiseTask, captured, model_of, rate
from fedecho import load
from fedecho.core.types import Dispatch
from fedecho.distill.distiller import Adam
from fedecho.executors.executor import Job
from fedecho.gpu.capture import Precision
from fedecho.gpu.executor import CudaExecutor
from fedecho.gpu.streams import record_event
from fedecho.runs.on_gpu import GpuParts, gpu_settings, select_gpu

PRODUCTS = ("conv", "xmma", "cutlass", "gemm", "cudnn", "nvjet", "wgrad", "dgrad")
"""Words in the names of kernels that convolve and multiply; what inductor makes is BatchNorm, ReLU and the update."""


def kind_of(name: str) -> str:
    product = not name.startswith("triton") and any(word in name.lower() for word in PRODUCTS)
    return "convolutions" if product else "BatchNorm, ReLU, update"


def weighed(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, float, float]]:
    """(kernels, microseconds, microseconds weighed by the share of the card) by kind, from a profiler's trace."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for event in events:
        if event.get("cat") != "kernel":
            continue
        sums, share = found[kind_of(event["name"])], min(1.0, event["args"].get("blocks per SM") or 1.0)
        for index, amount in enumerate((1, event["dur"], event["dur"] * share)):
            sums[index] += amount
    return {kind: (int(count), total, share) for kind, (count, total, share) in found.items()}


def traced(work: Callable[[], None], times: int = 5) -> list[dict[str, Any]]:
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def step_of(parts: GpuParts) -> Callable[[], None]:
    """One captured SGD step, again and again on the first batch."""
    executor = parts.executor(1, None)
    assert isinstance(executor, CudaExecutor)
    slot = executor.slots[0]
    slot.begin(Job(Dispatch(0, 0, model_of(parts), 0)), record_event(parts.device))

    def step() -> None:
        with slot.stream.queue():
            slot.cursor.zero_()
            slot.graph.replay()

    return step


def ms_of(work: Callable[[], object], times: int) -> float:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times * 1e3


def server_ms(parts: GpuParts) -> tuple[float, float]:
    """Inference on U, and one distillation."""
    student, distiller, model = parts.student(), parts.experiment.algorithm.distiller, model_of(parts)  # type: ignore[attr-defined]
    batches = list(torch.arange(parts.task.num_unlabeled, device=parts.device).split(distiller.batch_size))
    adam, teacher = Adam.fresh(model.weights.params), student.infer(model.weights)
    infer = ms_of(lambda: student.infer(model.weights), 20)
    return infer, ms_of(lambda: student.teach(distiller, adam, model.weights, teacher, batches), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=at_least_one, nargs="*", default=[1, 6, 8, 12])
    parser.add_argument("--seconds", type=positive, default=1.5)
    options = parser.parse_args()
    need_gpu(parser)
    device, precision, times = select_gpu(), Precision(), 5
    experiment = replace(load("cifar10", algorithm="fedecho"), task=NoiseTask())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-18, batch 50, bf16, compiled", flush=True)
    with gpu_settings(precision, device):
        parts = GpuParts(experiment, precision, device)
        kinds = weighed(traced(step_of(parts), times))
        whole = sum(share for _, _, share in kinds.values())
        for kind, (count, total, share) in sorted(kinds.items(), key=lambda item: -item[1][2]):
            sums = f"{count / times:5.0f} kernels {total / times:7.0f} us, weighed {share / times:6.0f} us {share / whole:4.0%}"
            print(f"{kind:<30} {sums}")
        print(f"{'one step':<30} weighed {whole / times / 1e3:.2f} ms", flush=True)
        for streams in options.streams:
            print(f"{streams:>2} streams {rate(captured(parts, streams), options.seconds):>8,.0f} images/s", flush=True)
            torch.cuda.empty_cache()
        infer, teach = server_ms(parts)
        print(f"inference on U {infer:.2f} ms, distillation {teach:.1f} ms")


if __name__ == "__main__":
    main()

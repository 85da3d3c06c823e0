"""How a run is computed: the executor, its workers and their devices."""

import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from fedecho.core.layout import Layout
from fedecho.core.ranges import at_least, check_ranges
from fedecho.executors.executor import CPU, Bench, Executor
from fedecho.executors.pool import PoolExecutor
from fedecho.executors.ray_cluster import check_address, check_ray, ray_settings
from fedecho.executors.worker_pool import DEPTH, Crew
from fedecho.gpu import channel_ops
from fedecho.gpu.capture import Precision
from fedecho.learning.trainer import Trainer

ExecutorName = Literal["serial", "pool", "cuda", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = ("serial", "pool", "cuda", "ray")
DeviceName = Literal["cpu", "cuda"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SLOTS = 6
"""Clients at once on one GPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
WITHOUT_KERNELS = "without kernels"
"""In a header: why torch's own operations took the place of kernels of ours."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """On the CPU it changes no bit of a result; a GPU rounds in its own way, ``precision`` says how.

    ``workers`` are the processes of a pool, the actors on a Ray cluster, or the clients at once on one GPU. With
    ``device="cuda"`` each worker of a pool or a cluster has a GPU of its own. ``gpus`` are those of this machine as
    CUDA_VISIBLE_DEVICES names them; by default all that torch sees. One that is named twice serves two workers.
    """

    executor: ExecutorName = "serial"
    workers: Annotated[int, at_least(1, most=10**5)] | None = None
    precision: Literal["bf16", "fp32"] = "bf16"
    deterministic: bool = False
    compiled: bool = True
    device: DeviceName | None = None
    address: str | None = None
    gpus: tuple[str, ...] | None = None
    other_software: bool = False
    """Go on with a run of other software all the same; its record will say so."""

    def __post_init__(self) -> None:
        check_ranges(self, "--")
        if self.executor == "serial" and (self.workers or 1) > 1:
            raise ValueError(f"--workers {self.workers} goes with --executor pool, ray or cuda: serial is this process alone")
        self._check_device()
        if self.address is not None and self.executor != "ray":
            raise ValueError(f"--address {self.address} is of a Ray cluster: it goes with --executor ray, not {self.executor}")
        if self.executor == "ray":
            check_ray()
            check_address(self.address)
        self._check_room()

    def _check_device(self) -> None:
        if self.executor == "serial" and self.device == "cuda":
            raise ValueError("--executor serial is on the CPU: for one GPU use --executor cuda, for several pool --device cuda")
        if self.executor == "cuda" and self.device == "cpu":
            raise ValueError("--executor cuda is on a GPU: leave --device out, or use serial or pool")

    def _check_room(self) -> None:
        """On this machine. What a cluster has is known when it is asked."""
        if self.executor not in ("pool", "ray") or self.address is not None:
            return
        if self.on_gpu:
            self.worker_gpus()
            return
        most = 4 * (os.cpu_count() or 1)
        if self.num_workers > max(most, 2):
            raise ValueError(f"--workers {self.workers} is more than this machine's cores can use; at most {most} here")

    @property
    def on_gpu(self) -> bool:
        return self.executor == "cuda" or self.device == "cuda"

    @property
    def num_workers(self) -> int:
        """As told, or by default. A cluster that is joined says itself how many cores and GPUs it has."""
        if self.workers is not None or self.executor in ("serial", "cuda"):
            return self.workers or {"serial": 1, "cuda": SLOTS}[self.executor]
        if self.on_gpu:
            return len(self._known_gpus)
        return 2 if self.executor == "pool" else os.cpu_count() or 1

    @property
    def _known_gpus(self) -> tuple[str, ...]:
        return visible_gpus() if self.gpus is None else self.gpus

    def worker_gpus(self) -> tuple[str, ...]:
        """The GPU of each worker on this machine."""
        known = self._known_gpus
        if not known:
            raise ValueError(f"--executor {self.executor} --device cuda needs NVIDIA GPUs, and torch sees none here")
        if self.num_workers > len(known):
            raise ValueError(
                f"--workers {self.workers} need a GPU each, and torch sees {len(known)} here ({', '.join(known)}): ask for fewer"
            )
        return known[: self.num_workers]

    @property
    def arithmetic(self) -> Precision:
        return Precision(DTYPES[self.precision], self.deterministic, self.compiled)

    def described(self) -> dict[str, Any]:
        told: dict[str, Any] = {"executor": self.executor, "workers": self.num_workers}
        if self.address is not None:
            told["address"] = self.address
        if self.on_gpu:
            told |= {"precision": self.precision, "deterministic": self.deterministic, "compiled": self.compiled}
            told["device"] = torch.cuda.get_device_name()
            told |= {WITHOUT_KERNELS: channel_ops.FAULT} if channel_ops.FAULT else {}
        return told

    def check_same_kernels(self, folder: Path, before: Mapping[str, Any]) -> None:
        """``before`` is ``described`` in a run's header. Asked when all is put together: earlier it is not known."""
        now = self.described()
        if (WITHOUT_KERNELS in before) != (WITHOUT_KERNELS in now):
            with_them = f"with kernels of ours, which are not right here ({now.get(WITHOUT_KERNELS)})"
            without = f"without kernels of ours ({before.get(WITHOUT_KERNELS)}), which are right here"
            told = with_them if WITHOUT_KERNELS in now else without
            raise ValueError(f"{folder} was computed {told}: go on where it began, or use another folder")


def as_before(before: Mapping[str, Any], executor: str | None = None) -> dict[str, Any]:
    """How a run goes on: where it ran before (``described`` in its header) unless told otherwise, on a GPU if it was on one."""
    chosen = executor or before.get("executor", "serial")
    device = "cuda" if "device" in before and chosen in ("pool", "ray") else None
    told = {"precision": before.get("precision", "bf16"), "deterministic": before.get("deterministic", False)}
    return {"executor": chosen, "device": device, **told}


SAME = "use the same --executor, --device, --precision and --deterministic, or another folder"


def check_same_arithmetic(folder: Path, before: Mapping[str, Any], now: Execution, advice: str = SAME) -> None:
    """``before`` is ``described`` in a run's header. CPUs give the same bytes on all executors; a GPU rounds in its own way."""
    names = ("precision", "deterministic")
    wanted = {name: getattr(now, name) for name in names} if now.on_gpu else {}
    found = {name: before.get(name) for name in names} if "device" in before else {}
    if found != wanted:
        raise ValueError(f"{folder} was computed {_place(found)}, and is now to be {_place(wanted)}: {advice}")


def _place(arithmetic: Mapping[str, Any]) -> str:
    if not arithmetic:
        return "on a CPU"
    return f"on a GPU in {arithmetic['precision']}{', deterministic' if arithmetic['deterministic'] else ''}"


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them: a worker is shown one by that name."""
    count, told = torch.cuda.device_count(), os.environ.get(VISIBLE)
    names = [str(index) for index in range(count)] if told is None else [name.strip() for name in told.split(",")]
    return tuple(names[:count])


def crew_of(
    execution: Execution,
    make: Callable[[], Trainer | Bench],
    layout: Layout,
    wanted: Set[int] | None,
    say: Callable[[str], None],
    device: torch.device = CPU,
) -> Crew[Any]:
    """Workers that keep what ``make`` gives; their results come to ``device``."""
    # A GPU works on several jobs, and has the next of each at hand.
    depth = DEPTH * SLOTS if execution.on_gpu else DEPTH
    if execution.executor == "pool":
        return PoolExecutor(
            num_workers=execution.num_workers,
            layout=layout,
            make_trainer=make,
            wanted=wanted,
            depth=depth,
            gpus=execution.worker_gpus() if execution.on_gpu else None,
            device=device,
        )
    say("starting Ray on this machine" if execution.address is None else f"joining the Ray cluster at {execution.address}")
    with ray_settings():
        from fedecho.executors.ray_cluster import Cluster
        from fedecho.executors.ray_executor import RayExecutor

        cluster = Cluster(execution.address, execution.workers, execution.on_gpu)
    return RayExecutor(cluster=cluster, make_trainer=make, wanted=wanted, depth=depth, device=device, say=say)


def settled(execution: Execution, runner: Executor) -> Execution:
    """With the number of workers that there are: a cluster says itself how many it has room for."""
    return replace(execution, workers=runner.num_workers) if isinstance(runner, Crew) else execution

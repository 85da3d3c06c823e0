"""How a run is computed: the executor, its workers and their devices."""

import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from fedecho.core.layout import Layout
from fedecho.core.ranges import at_least, check_ranges
from fedecho.executors.executor import CPU, Executor, JobRunner
from fedecho.executors.pool import PoolExecutor
from fedecho.executors.ray_address import check_address, check_ray, ray_settings
from fedecho.executors.worker_pool import DEPTH, WorkerPool
from fedecho.gpu import channel_ops
from fedecho.gpu.capture import Precision
from fedecho.learning.trainer import Trainer

ExecutorName = Literal["serial", "pool", "cuda", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = ("serial", "pool", "cuda", "ray")
DeviceName = Literal["cpu", "cuda"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SLOTS = 6
"""Clients that train at once on one GPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
WITHOUT_KERNELS = "without kernels"
"""Key in a run's header: why torch operations were used in place of our own kernels."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed. All CPU executors give bit-identical results; on a GPU results depend on ``precision``.

    ``workers`` is the number of pool processes, of actors on a Ray cluster, or of clients that train at once on one GPU. With
    ``device="cuda"`` each worker of a pool or cluster gets its own GPU. ``gpus`` lists this machine's GPUs as in
    CUDA_VISIBLE_DEVICES (default: all that torch sees). A GPU listed twice serves two workers.
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
    """Resume a run even if other software began it. The record notes the change."""

    def __post_init__(self) -> None:
        check_ranges(self, "--")
        if self.executor == "serial" and (self.workers or 1) > 1:
            raise ValueError(f"--workers {self.workers} needs --executor pool, ray or cuda: serial uses this process only")
        self._check_device()
        if self.address is not None and self.executor != "ray":
            raise ValueError(f"--address {self.address} needs --executor ray, got {self.executor}")
        if self.executor == "ray":
            check_ray()
            check_address(self.address)
        self._check_num_workers()

    def _check_device(self) -> None:
        if self.executor == "serial" and self.device == "cuda":
            raise ValueError(
                "--executor serial runs on the CPU: use --executor cuda for one GPU, or --executor pool --device cuda for several"
            )
        if self.executor == "cuda" and self.device == "cpu":
            raise ValueError("--executor cuda runs on a GPU: omit --device, or use serial or pool")

    def _check_num_workers(self) -> None:
        """Check the number of workers against this machine. A joined cluster is checked when it is started."""
        if self.executor not in ("pool", "ray") or self.address is not None:
            return
        if self.on_gpu:
            self.worker_gpus()
            return
        most = 4 * (os.cpu_count() or 1)
        if self.num_workers > max(most, 2):
            raise ValueError(f"--workers {self.workers} is too many for this machine's cores: use at most {most}")

    @property
    def on_gpu(self) -> bool:
        return self.executor == "cuda" or self.device == "cuda"

    @property
    def num_workers(self) -> int:
        """The number of workers as set, or the default. A joined cluster determines its own default."""
        if self.workers is not None or self.executor in ("serial", "cuda"):
            return self.workers or {"serial": 1, "cuda": SLOTS}[self.executor]
        if self.on_gpu:
            return len(self._available_gpus)
        return 2 if self.executor == "pool" else os.cpu_count() or 1

    @property
    def _available_gpus(self) -> tuple[str, ...]:
        return visible_gpus() if self.gpus is None else self.gpus

    def worker_gpus(self) -> tuple[str, ...]:
        """The GPU of each worker on this machine."""
        gpus = self._available_gpus
        if not gpus:
            raise ValueError(f"--executor {self.executor} --device cuda needs NVIDIA GPUs, but torch sees none")
        if self.num_workers > len(gpus):
            raise ValueError(
                f"--workers {self.workers} needs one GPU per worker, but torch sees only {len(gpus)} ({', '.join(gpus)}): "
                "lower --workers"
            )
        return gpus[: self.num_workers]

    @property
    def arithmetic(self) -> Precision:
        return Precision(DTYPES[self.precision], self.deterministic, self.compiled)

    def described(self) -> dict[str, Any]:
        """The entry ``execution`` of a run's header."""
        entry: dict[str, Any] = {"executor": self.executor, "workers": self.num_workers}
        if self.address is not None:
            entry["address"] = self.address
        if self.on_gpu:
            entry |= {"precision": self.precision, "deterministic": self.deterministic, "compiled": self.compiled}
            entry["device"] = torch.cuda.get_device_name()
            entry |= {WITHOUT_KERNELS: channel_ops.FAULT} if channel_ops.FAULT else {}
        return entry

    def check_same_kernels(self, folder: Path, before: Mapping[str, Any]) -> None:
        """Check that a resumed run uses our kernels if and only if it did before. Known only once the simulation is built.

        ``before`` is the entry ``execution`` of the run's header.
        """
        now = self.described()
        if (WITHOUT_KERNELS in before) != (WITHOUT_KERNELS in now):
            with_kernels = f"with FedEcho's own kernels, which fail their self-test here ({now.get(WITHOUT_KERNELS)})"
            without = f"without FedEcho's own kernels ({before.get(WITHOUT_KERNELS)}), which work here"
            how = with_kernels if WITHOUT_KERNELS in now else without
            raise ValueError(f"{folder} was computed {how}: resume it on the original machine, or use another folder")


def resume_options(before: Mapping[str, Any], executor: str | None = None) -> dict[str, Any]:
    """Keyword arguments of ``simulate`` to resume a run: on a GPU if it was on one, with ``executor`` if given.

    ``before`` is the entry ``execution`` of the run's header.
    """
    chosen = executor or before.get("executor", "serial")
    device = "cuda" if "device" in before and chosen in ("pool", "ray") else None
    arithmetic = {"precision": before.get("precision", "bf16"), "deterministic": before.get("deterministic", False)}
    return {"executor": chosen, "device": device, **arithmetic}


SAME = "use the same --executor, --device, --precision and --deterministic, or another folder"


def check_same_arithmetic(folder: Path, before: Mapping[str, Any], now: Execution, advice: str = SAME) -> None:
    """Check that a run is resumed with the same arithmetic. All CPU executors give bit-identical results; GPUs do not.

    ``before`` is the entry ``execution`` of the run's header.
    """
    new = {"precision": now.precision, "deterministic": now.deterministic} if now.on_gpu else {}
    old = {name: before.get(name) for name in ("precision", "deterministic")} if "device" in before else {}
    if old != new:
        raise ValueError(
            f"{folder} was computed {_arithmetic_text(old)}, but is to be resumed {_arithmetic_text(new)}: {advice}"
        )


def _arithmetic_text(arithmetic: Mapping[str, Any]) -> str:
    if not arithmetic:
        return "on a CPU"
    return f"on a GPU in {arithmetic['precision']}{', deterministic' if arithmetic['deterministic'] else ''}"


def visible_gpus() -> tuple[str, ...]:
    """The names of the GPUs that torch sees, as in CUDA_VISIBLE_DEVICES. Each worker is given one of them."""
    count, visible = torch.cuda.device_count(), os.environ.get(VISIBLE)
    names = [str(index) for index in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    return tuple(names[:count])


def start_workers(
    execution: Execution,
    make: Callable[[], Trainer | JobRunner],
    layout: Layout,
    wanted: Set[int] | None,
    say: Callable[[str], None],
    device: torch.device = CPU,
) -> WorkerPool[Any]:
    """Start the workers of a pool or a Ray cluster. Each calls ``make`` once; results are moved to ``device``."""
    # A GPU runs several jobs at once, each with the next ones queued.
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


def with_actual_workers(execution: Execution, runner: Executor) -> Execution:
    """The execution with the number of workers that were actually started: a cluster determines it itself."""
    return replace(execution, workers=runner.num_workers) if isinstance(runner, WorkerPool) else execution

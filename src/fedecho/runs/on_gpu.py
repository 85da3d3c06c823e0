"""Builds an experiment for one GPU: several clients at once, captured as a whole, or one at a time in captured steps."""

import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.modules import copy_module, structure_of
from fedecho.core.randomness import derive
from fedecho.core.task import Task, can_move, defines, scores_of
from fedecho.core.types import Weights
from fedecho.distill.student import Student, student_for
from fedecho.executors.executor import Executor, JobRunner, SerialExecutor
from fedecho.gpu import channel_ops
from fedecho.gpu.capture import Capturable, Forward, Precision, compiled_update, forward_of
from fedecho.gpu.distillation import CapturedStudent, DeviceModule, DeviceStudent, Forwards
from fedecho.gpu.executor import CudaExecutor, Plan, batch_under_cursor, weighted_loss
from fedecho.gpu.fused import fused_inference
from fedecho.gpu.replay import ReplayedSteps
from fedecho.gpu.row_norm import with_row_norm
from fedecho.gpu.self_test import check_kernels, fault, norm_shapes, wrong_products
from fedecho.gpu.streams import server_stream
from fedecho.learning.trainer import Trainer
from fedecho.runs.build import distiller_of
from fedecho.runs.execution import SLOTS
from fedecho.runs.experiment import Experiment
from fedecho.runs.signals import ShortageError

CHUNK = 2000
"""Images per inference batch; larger batches use the GPU better, and the activations of 2,000 take half a gigabyte."""


class GpuParts:
    """The parts of a simulation that run on the GPU: network, executor, student and evaluation.

    ``one_by_one`` is the reason why clients train one at a time, in replayed steps, with the server's work eager; empty if
    training is captured as a whole. ``say`` receives a message if not even the steps can be captured. With ``serves=False`` the
    parts only train clients: there is no student and no evaluation.
    """

    def __init__(
        self,
        experiment: Experiment,
        precision: Precision,
        device: torch.device,
        say: Callable[[str], None] = lambda text: None,
        serves: bool = True,
    ) -> None:
        self.experiment, self.precision, self.device, self.say = experiment, precision, device, say
        self.task: Task = _on(experiment.task, str(self.device), precision)
        self._template = self.task.network(derive(experiment.seed, "network"))
        self.network: BoundNetwork = Layout.of(self._template).bind(self._template, self.device)
        self.one_by_one = _why_not(self.task, experiment, self._template) or _why_not_channels_last(self.task, self._template)
        self._forwards: dict[str, Forward] = {}
        if not self.one_by_one and device.type == "cuda" and precision.dtype == torch.bfloat16:
            self._check_kernels()
        self._net = self._device_student() if serves and not self.one_by_one else None
        self._device_module = None if self._net is None else DeviceModule(self._net).eval()

    def student(self) -> Student:
        task, distiller = self.task, self._distiller
        if self._net is None:
            return student_for(self.network, task, distiller, CHUNK)
        student = CapturedStudent(self.network, task.logits, task.num_unlabeled, CHUNK, self._net)
        return student if distiller is None else student.prepared(distiller)

    def executor(self, num_slots: int, wanted: Set[int] | None) -> Executor:
        local, task = self.experiment.local_training, self.task
        if self.one_by_one or not isinstance(task, Capturable):
            steps = ReplayedSteps(task, local, self.network, self.precision, self.say)
            trainer = Trainer(task, local, self.network, steps)
            return SerialExecutor(lambda job: trainer.train(job.dispatch, job.control))
        plan = Plan(
            task=task,
            num_examples=[task.num_examples(client) for client in range(task.num_clients)],
            local=local,
            layout=self.network.layout,
            resident=task.resident(),
            batch=batch_under_cursor(task, self.precision),
            forward=self._forward(training=True),
            loss=weighted_loss(task, self.precision),
            update=compiled_update(local, self.precision),
            precision=self.precision,
            device=self.device,
        )
        return CudaExecutor(plan, num_slots=num_slots, wanted=wanted)

    def evaluate(self, weights: Weights) -> dict[str, float]:
        if self._device_module is None:
            self.network.load(weights)
            return scores_of(self.task, self.network.module)
        self._device_module.net.weights.load(weights)
        return scores_of(self.task, self._device_module)

    def _check_kernels(self) -> None:
        task = self.task
        assert isinstance(task, Capturable)  # noqa: S101 (for the type checker)
        rows, draws = task.rows_of(0)[:1], task.draw(1, torch.Generator())
        images, _ = task.pick(task.resident(), rows.to(self.device), draws.to(self.device))
        sizes = {self.experiment.local.batch_size, *([] if self._distiller is None else [self._distiller.batch_size])}
        shapes = norm_shapes(self.network.module, images, sizes)
        if cause := check_kernels(self.device, shapes):
            self.say(f"BatchNorm uses torch's own operations instead of our kernels: {cause}")

    @property
    def _distiller(self) -> Any:
        return distiller_of(self.experiment)

    def _device_student(self) -> DeviceStudent:
        task = self.task
        assert isinstance(task, Capturable)  # noqa: S101 (for the type checker)
        student = Student(self.network, self.task.logits, max(self.task.num_unlabeled, 1), CHUNK)
        forwards = Forwards(self._forward(training=True), self._forward(training=False), self._inference())
        batch_size = 1 if self._distiller is None else self._distiller.batch_size
        return DeviceStudent(student, task, forwards, self.precision, batch_size)

    def _forward(self, training: bool) -> Forward:
        return self._cached("train" if training else "eval", lambda: _forward(self._template, training, self._target))

    def _inference(self) -> Forward:
        """Return the inference function: fused in low precision, plain in fp32 like the other paths."""
        if self.precision.dtype == torch.float32:
            return self._forward(training=False)
        return self._cached("infer", lambda: _inference(self._template, self._target) or self._forward(training=False))

    def _cached(self, mode: str, make: Callable[[], Forward]) -> Forward:
        """Make a function once. For a network of known layers, share it between all runs of the process: compiling is slow."""
        structure = structure_of(self._template)
        if structure is None:
            return self._forwards.get(mode) or self._forwards.setdefault(mode, make())
        key = (structure, mode, self._target)
        return SHARED.get(key) or SHARED.setdefault(key, make())

    @property
    def _target(self) -> "_Target":
        return self.precision, self.device


@dataclass(frozen=True)
class MakeJobRunner:
    """Builds a job runner on the first GPU that a worker sees. It is pickled to workers, so it holds settings and no tensors."""

    experiment: Experiment
    precision: Precision
    device: str | None = None
    """Device to use instead of that GPU."""

    def __call__(self) -> JobRunner:
        device = select_gpu() if self.device is None else torch.device(self.device)
        settings = ExitStack()
        settings.enter_context(gpu_settings(self.precision, device))
        parts = GpuParts(self.experiment, self.precision, device, _on_stderr, serves=False)
        return JobRunner(parts.network.layout, parts.executor(SLOTS, None), device, settings)


def _on_stderr(text: str) -> None:
    """Print a worker's message; it has no other channel."""
    print(text, file=sys.stderr, flush=True)


_Target = tuple[Precision, torch.device]
SHARED: dict[Hashable, Forward] = {}
"""Compiled functions of networks that ``structure_of`` recognises, shared by all runs of the process."""


def _forward(template: nn.Module, training: bool, target: _Target) -> Forward:
    precision, device = target
    return forward_of(with_row_norm(copy_module(template)).to(device).train(training), precision)


def _inference(template: nn.Module, target: _Target) -> Forward | None:
    precision, device = target
    return fused_inference(copy_module(template).to(device), precision.dtype, precision.compile)


def _why_not_channels_last(task: Task, template: nn.Module) -> str:
    """Return why a user's network cannot take the captured layers, whose outputs are channels-last, or an empty string.

    It is tried on two examples, on the CPU. Networks of torch's own layers need no trial.
    """
    if structure_of(template) is not None or not isinstance(task, Capturable):
        return ""
    rows, generator = task.rows_of(0), torch.Generator()
    rows = rows[torch.arange(2) % len(rows)]
    resident = task.resident()
    images, _ = task.pick(resident, *(each.to(resident[0].device) for each in (rows, task.draw(2, generator))))
    try:
        with torch.no_grad():
            with_row_norm(copy_module(template)).eval()(images.float().cpu())
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            return ""  # not about the memory format: the captured program reports it
        return "the network calls view on a convolution's output, which is channels-last when captured (reshape would do)"
    return ""


def forget_compiled() -> None:
    """Clear everything compiled that runs of this process share, after a change to the kernels."""
    SHARED.clear()
    fault.cache_clear()
    channel_ops.FAULT = ""
    torch._dynamo.reset()


def _on(task: Task, device: str, precision: Precision) -> Task:
    if not can_move(task):
        raise ValueError(
            f"{type(task).__name__} cannot run on a GPU: it has no method on(device). Use --executor serial or pool."
        )
    placed: Any = task.on(device)
    if defines(placed, "computing_in"):
        placed = placed.computing_in(precision.dtype)
    ready: Task = placed.in_few_shapes() if defines(placed, "in_few_shapes") else placed
    return ready


def _why_not(task: Task, experiment: Experiment, module: nn.Module) -> str:
    """Return why a client's training cannot be captured as a whole, or an empty string."""
    if not isinstance(task, Capturable):
        return f"{type(task).__name__} does not build its batches on the device (see fedecho.gpu.capture.Capturable)"
    if experiment.local.optimizer != "sgd":
        return f"local.optimizer is {experiment.local.optimizer!r}, and only sgd can be captured as a whole"
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.modules()):
        return "the network has dropout"
    if any(not param.requires_grad for param in module.parameters()):
        return "the network has frozen parameters"
    return ""


MPS, CONNECTIONS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_MAX_CONNECTIONS"
MPS_CONTROL = "/tmp/nvidia-mps/control"  # noqa: S108
"""Default control socket of the MPS daemon."""


def select_gpu() -> torch.device:
    """Start CUDA and return its current device; raise if it is missing, busy or computes wrong products."""
    # CUDA reads these when it starts. With only 8 connections, streams wait for each other; cuBLAS is deterministic only with
    # this workspace. Under MPS all processes share about a hundred connections: three with 32 each leave none for a fourth.
    os.environ.setdefault(CONNECTIONS, "4" if os.environ.get(MPS) or _mps_is_running() else "32")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.cuda.is_available():
        raise ValueError("training on cuda needs an NVIDIA GPU, and torch sees none here; use --executor serial or pool")
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)  # this initialises CUDA
    except RuntimeError as error:
        raise _start_error(str(error)) from None
    if wrong := wrong_products(device):
        raise ValueError(f"the GPU cannot be used: {wrong}")
    return device


def _mps_is_running() -> bool:
    # Path.exists would raise if the folder belongs to another user; CUDA cannot reach that daemon either.
    return os.access(MPS_CONTROL, os.F_OK)


def _start_error(error: str) -> ValueError:
    """Return the reason why CUDA did not start as a one-line error."""
    if "busy or unavailable" not in error and "out of memory" not in error:
        return ValueError(f"the GPU cannot be used: {(error.strip().splitlines() or ['no reason given'])[0]}")
    return ShortageError(
        "the GPU accepts no further process: others use it exclusively, use all of its memory, or have used up the MPS "
        f"connections (lower {CONNECTIONS}, now {os.environ.get(CONNECTIONS)}, for every process, or run fewer at once)"
    )


@contextmanager
def gpu_settings(precision: Precision, device: torch.device) -> Iterator[None]:
    """Apply the GPU settings of one run, with the server's work on its own stream."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32)
    # Fused attention kernels sum gradients in an arbitrary order and only warn about it.
    attention = sdpa_kernel(SDPBackend.MATH) if precision.deterministic else nullcontext()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn.benchmark, cudnn.deterministic = not precision.deterministic, precision.deterministic
    # By default torch rounds fp32 convolutions to the 10 bits of TF32; an fp32 run must really use fp32.
    cudnn.allow_tf32 = matmul.allow_tf32 = precision.dtype != torch.float32
    torch.use_deterministic_algorithms(precision.deterministic, warn_only=True)
    # Learning rates are compiled in, and each method of a table has its own: more variants than torch expects.
    limits: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # the latter in torch 2.6
    limit = getattr(limits, name)
    setattr(limits, name, max(limit, 128))
    try:
        with attention, server_stream(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* available but not enabled")  # intended
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(was_deterministic)
        setattr(limits, name, limit)

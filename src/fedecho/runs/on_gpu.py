"""An experiment composed on one GPU: several clients at once, captured whole, or one at a time in captured steps."""

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
from fedecho.core.modules import copied, structure_of
from fedecho.core.randomness import derive
from fedecho.core.task import Task, defines, scores_of
from fedecho.core.types import Weights
from fedecho.distill.student import Student, student_for
from fedecho.executors.executor import Bench, Executor, SerialExecutor
from fedecho.gpu import channel_ops
from fedecho.gpu.capture import Capturable, Forward, Precision, compiled_update, forward_of
from fedecho.gpu.distillation import CapturedStudent, DeviceStudent, Forwards, HeldModule
from fedecho.gpu.executor import CudaExecutor, Plan, batch_under_cursor, weighted_loss
from fedecho.gpu.fused import fused_inference
from fedecho.gpu.replay import ReplayedSteps
from fedecho.gpu.row_norm import with_row_norm
from fedecho.gpu.self_test import fault, norm_shapes, without_kernels, wrong_products
from fedecho.gpu.streams import server_lane
from fedecho.learning.trainer import Trainer
from fedecho.runs.build import distiller_of
from fedecho.runs.execution import SLOTS
from fedecho.runs.experiment import Experiment
from fedecho.runs.signals import ShortageError

CHUNK = 2000
"""Images at once in inference: the more, the fuller the GPU; activations of 2,000 take half a gigabyte."""


class GpuParts:
    """What a simulation needs of the GPU.

    ``one_by_one`` says why clients train one after another, in steps that are replayed, and the server's work is eager; or it is
    empty. ``say`` is told if not even the steps can be captured. Where clients are only trained, and nothing ``serves``, there is
    no student and no evaluation.
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
        self.one_by_one = _why_not(self.task, experiment, self._template)
        self._forwards: dict[str, Forward] = {}
        if not self.one_by_one and device.type == "cuda" and precision.dtype == torch.bfloat16:
            self._check_kernels()
        self._net = self._device_student() if serves and not self.one_by_one else None
        self._held = None if self._net is None else HeldModule(self._net).eval()

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
        if self._held is None:
            self.network.load(weights)
            return scores_of(self.task, self.network.module)
        self._held.net.weights.load(weights)
        return scores_of(self.task, self._held)

    def _check_kernels(self) -> None:
        task = self.task
        assert isinstance(task, Capturable)  # noqa: S101 (for the type checker)
        rows, draws = task.rows_of(0)[:1], task.draw(1, torch.Generator())
        images, _ = task.pick(task.resident(), rows.to(self.device), draws.to(self.device))
        sizes = {self.experiment.local.batch_size, *([] if self._distiller is None else [self._distiller.batch_size])}
        shapes = norm_shapes(self.network.module, images, sizes)
        if cause := without_kernels(self.device, shapes):
            self.say(f"BatchNorm is computed by torch's own operations, not by kernels of ours: {cause}")

    @property
    def _distiller(self) -> Any:
        return distiller_of(self.experiment)

    def _device_student(self) -> DeviceStudent:
        task = self.task
        assert isinstance(task, Capturable)  # noqa: S101 (for the type checker)
        student = Student(self.network, self.task.logits, max(self.task.num_unlabeled, 1), CHUNK)
        forwards = Forwards(self._forward(training=True), self._forward(training=False), self._inference())
        return DeviceStudent(student, task, forwards, self.precision, getattr(self._distiller, "batch_size", 1))

    def _forward(self, training: bool) -> Forward:
        return self._made("train" if training else "eval", lambda: _forward(self._template, training, self._place))

    def _inference(self) -> Forward:
        """Fused in low precision; in fp32 as the other paths compute it."""
        if self.precision.dtype == torch.float32:
            return self._forward(training=False)
        return self._made("infer", lambda: _inference(self._template, self._place) or self._forward(training=False))

    def _made(self, mode: str, make: Callable[[], Forward]) -> Forward:
        """Made once; of a network of known layers, once for all runs of a process: compiling takes longer than some of them."""
        structure = structure_of(self._template)
        if structure is None:
            return self._forwards.get(mode) or self._forwards.setdefault(mode, make())
        key = (structure, mode, self._place)
        return SHARED.get(key) or SHARED.setdefault(key, make())

    @property
    def _place(self) -> "_Place":
        return self.precision, self.device


@dataclass(frozen=True)
class MakeBench:
    """Builds a bench on the first GPU that a worker sees; pickled to worker processes, so it holds settings and no tensors."""

    experiment: Experiment
    precision: Precision
    device: str | None = None
    """Another device than that GPU."""

    def __call__(self) -> Bench:
        device = the_gpu() if self.device is None else torch.device(self.device)
        settings = ExitStack()
        settings.enter_context(gpu_settings(self.precision, device))
        parts = GpuParts(self.experiment, self.precision, device, _on_stderr, serves=False)
        return Bench(parts.network.layout, parts.executor(SLOTS, None), device, settings)


def _on_stderr(text: str) -> None:
    """A worker has nobody else to tell."""
    print(text, file=sys.stderr, flush=True)


_Place = tuple[Precision, torch.device]
SHARED: dict[Hashable, Forward] = {}
"""The forwards of networks that ``structure_of`` knows."""


def _forward(template: nn.Module, training: bool, place: _Place) -> Forward:
    precision, device = place
    return forward_of(with_row_norm(copied(template)).to(device).train(training), precision)


def _inference(template: nn.Module, place: _Place) -> Forward | None:
    precision, device = place
    return fused_inference(copied(template).to(device), precision.dtype, precision.compile)


def forget_compiled() -> None:
    """What all runs of a process share is made anew: for who changes what it is made of."""
    SHARED.clear()
    fault.cache_clear()
    channel_ops.FAULT = ""
    torch._dynamo.reset()


def _on(task: Task, device: str, precision: Precision) -> Task:
    if not defines(task, "on"):
        raise ValueError(f"{type(task).__name__} cannot be put on a GPU: it has no method on(device); use serial or pool")
    own: Any = task
    placed: Any = own.on(device)
    if defines(placed, "computing_in"):
        placed = placed.computing_in(precision.dtype)
    ready: Task = placed.in_few_shapes() if defines(placed, "in_few_shapes") else placed
    return ready


def _why_not(task: Task, experiment: Experiment, module: nn.Module) -> str:
    """Why a client's training cannot be captured whole, or nothing."""
    if not isinstance(task, Capturable):
        return f"{type(task).__name__} does not make its batches on the device (see fedecho.gpu.capture.Capturable)"
    if experiment.local.optimizer != "sgd":
        return f"local.optimizer is {experiment.local.optimizer!r}, and only sgd is captured whole"
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.modules()):
        return "the network has dropout"
    if any(not param.requires_grad for param in module.parameters()):
        return "the network has frozen parameters"
    return ""


MPS, CONNECTIONS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_MAX_CONNECTIONS"
MPS_CONTROL = "/tmp/nvidia-mps/control"  # noqa: S108
"""Where the daemon of MPS listens, and every CUDA program looks, when nobody named another folder."""


def the_gpu() -> torch.device:
    # Read when CUDA starts: without more connections than 8, streams wait for each other; cuBLAS repeats its bytes only with this.
    # Under MPS all processes share some hundred connections: three with 32 each leave none for a fourth.
    os.environ.setdefault(CONNECTIONS, "4" if os.environ.get(MPS) or _listens() else "32")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.cuda.is_available():
        raise ValueError("training on cuda needs an NVIDIA GPU, and torch sees none here; use --executor serial or pool")
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)  # here CUDA really starts
    except RuntimeError as error:
        raise _refused(str(error)) from None
    if wrong := wrong_products(device):
        raise ValueError(f"the GPU cannot be used: {wrong}")
    return device


def _listens() -> bool:
    # Not Path.exists, which raises where the folder is another user's own; nor can CUDA then reach that daemon.
    return os.access(MPS_CONTROL, os.F_OK)


def _refused(error: str) -> ValueError:
    """Why CUDA did not start, in one line."""
    if "busy or unavailable" not in error and "out of memory" not in error:
        return ValueError(f"the GPU cannot be used: {(error.strip().splitlines() or ['no reason given'])[0]}")
    return ShortageError(
        "the GPU takes no further process: others hold it, exclusively or all of its memory, or have used up the connections "
        f"that MPS shares out (lower {CONNECTIONS}, now {os.environ.get(CONNECTIONS)}, for all of them, or run fewer at once)"
    )


@contextmanager
def gpu_settings(precision: Precision, device: torch.device) -> Iterator[None]:
    """The settings for one run on a GPU, with the server on a lane of its own."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32)
    # The fused kernels of attention add up their gradients in any order, and only warn of it.
    attention = sdpa_kernel(SDPBackend.MATH) if precision.deterministic else nullcontext()
    strictly = torch.are_deterministic_algorithms_enabled()
    cudnn.benchmark, cudnn.deterministic = not precision.deterministic, precision.deterministic
    # By default torch rounds fp32 convolutions to the 10 bits of TF32. Who asks for fp32 gets fp32.
    cudnn.allow_tf32 = matmul.allow_tf32 = precision.dtype != torch.float32
    torch.use_deterministic_algorithms(precision.deterministic, warn_only=True)
    # Each method of a table has its own learning rates, which are compiled in: more than torch expects of one function.
    limits: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # the latter in torch 2.6
    limit = getattr(limits, name)
    setattr(limits, name, max(limit, 128))
    try:
        with attention, server_lane(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* available but not enabled")  # that was asked for
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(strictly)
        setattr(limits, name, limit)

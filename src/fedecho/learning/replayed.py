"""Steps for a GPU: each is captured once for every shape of batch, then replayed, which costs the host next to nothing.

Any task can be captured whose loss asks the device for nothing while it is computed: no ``.item()``, no boolean indices, no
tensors from Python lists. What its Python code decides is decided when the step is captured. On a CPU the program is the same.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedecho.core.lanes import Graph, Lane, lane_on, memory_pool
from fedecho.core.layout import BoundNetwork
from fedecho.core.rng import rng_kept
from fedecho.core.task import Batch, Task
from fedecho.learning.batches import mapped, shape_of, tensors_of
from fedecho.learning.descent import bias_correction, step_of, wants_moments, wants_raw_mean
from fedecho.learning.local import LocalTraining

MOST_GRAPHS = 256
"""A graph of a thousand kernels takes some megabytes; a task with more shapes than this is not padded to few."""
FACTORIES = (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)
DRAWS = (torch.rand, torch.randint, torch.randn, torch.randperm)
NOTHING = nullcontext()


class MadeOnDevice(TorchFunctionMode):
    """Tensors that a model makes without saying where, and numbers that it wants there, are made on the device.

    A copy from the CPU cannot be captured. And a draw on the CPU would be made once, in the capture, and never again: on the
    device the code that looks at it cannot be captured, and runs eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        placed = kwargs.get("device") is not None
        if func is torch.tensor and placed and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], **kwargs)
        if not placed and (func in FACTORIES or (func in DRAWS and kwargs.get("generator") is None)):
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Captured:
    """A step on a batch at fixed addresses."""

    batch: list[Tensor]
    graph: Graph

    def replay(self, batch: Batch) -> None:
        for held, new in zip(self.batch, tensors_of(batch), strict=True):
            held.copy_(new)
        self.graph.replay()


@dataclass
class ReplayedSteps:
    """Zeroed gradients, loss, backward and the optimizer as one graph; the optimizer's state is on the device.

    ``compiled`` compiles the optimizer's step. ``eager`` says why nothing is captured any more, or is empty.
    """

    task: Task
    local: LocalTraining
    network: BoundNetwork
    compiled: bool = False
    say: Callable[[str], None] = lambda text: None
    lane: Lane | None = None
    eager: str = field(default="", init=False)
    graphs: dict[Hashable, Captured] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        params, local = self.network.weights.params, self.local
        self._device = params.device
        self._params = [part for part in self.network.module.parameters() if part.requires_grad]
        self._places: list[Tensor] = [part.grad for part in self._params if part.grad is not None]
        self._lane, self._pool = self.lane or lane_on(self._device), memory_pool(self._device)
        self._start = torch.zeros_like(params) if local.proximal else None
        self._shift = torch.zeros_like(params) if local.control_variates else None
        self._raw = torch.zeros_like(params) if wants_raw_mean(local) else None
        self._moments = (torch.zeros_like(params), torch.zeros_like(params)) if wants_moments(local) else ()
        # In float64: 1 - beta^count loses half of its digits in float32.
        self._count, self._loss = torch.zeros(2, dtype=torch.float64, device=self._device).unbind()
        self._descend = step_of(local, compiled=self.compiled)
        self._num_steps = 1

    def begin(self, start: Tensor, shift: Tensor | None, num_steps: int) -> None:
        self._num_steps = num_steps
        if shift is not None and self._shift is None:
            self._shift = torch.zeros_like(shift)
            self.graphs.clear()  # they know of no shift
        for tensor in (*self._state, self._shift):
            if tensor is not None:
                tensor.zero_()
        if self._start is not None:
            self._start.copy_(start)
        if shift is not None and self._shift is not None:
            self._shift.copy_(shift)

    def step(self, batch: Batch) -> None:
        captured = None if self.eager else self._captured(batch)
        if captured is None:
            self._work(batch)
        else:
            captured.replay(batch)

    def raw_mean(self) -> Tensor | None:
        return None if self._raw is None else self._raw / self._num_steps

    def mean_loss(self) -> float:
        return float(self._loss) / self._num_steps

    @property
    def _state(self) -> list[Tensor]:
        """What a step changes beside the weights."""
        return [*self._moments, self._count, self._loss, *([] if self._raw is None else [self._raw])]

    def _work(self, batch: Batch, making: AbstractContextManager[Any] = NOTHING) -> None:
        network = self.network
        # Without a cache of weights in low precision: one from before the capture would be that of old weights for ever.
        with making, torch.autocast(self._device.type, enabled=False, cache_enabled=False):
            loss = self._gradient(batch)
        self._count.add_(1)
        bias = [each.float() for each in bias_correction(self.local, self._count)] if self._moments else []
        self._descend(network.weights.params, network.grads, self._start, self._shift, *self._moments, *bias)
        self._loss.add_(loss)

    def _gradient(self, batch: Batch) -> Tensor:
        """As ``steps.gradient`` without its hundred little additions: what autograd finds goes to its place in a few kernels."""
        loss = self.task.loss(self.network.module, batch)
        found = torch.autograd.grad(loss, self._params, allow_unused=True)
        used = [(place, grad) for place, grad in zip(self._places, found, strict=True) if grad is not None]
        if len(used) < len(found):
            self.network.grads.zero_()
        torch._foreach_copy_([place for place, _ in used], [grad for _, grad in used])
        if self._raw is not None:
            self._raw.add_(self.network.grads)
        return loss.detach()

    def _captured(self, batch: Batch) -> Captured | None:
        """The graph for batches of this shape, captured at its first use; None where the step is to be eager."""
        try:
            shape = shape_of(batch)
            if shape not in self.graphs and len(self.graphs) < MOST_GRAPHS:
                self.graphs[shape] = self._capture(batch)
                if len(self.graphs) == MOST_GRAPHS:
                    self.say(f"training is captured for {MOST_GRAPHS} shapes of batch, and eager for any other from now on")
            return self.graphs.get(shape)
        except (RuntimeError, TypeError) as error:
            cause = f"a step of {type(self.task).__name__} cannot be captured ({_cause(error)})"
        self.graphs.clear()
        self.eager = cause
        self.say(f"training is not captured but eager: {cause}")
        return None

    def _capture(self, batch: Batch) -> Captured:
        held = mapped(batch, lambda tensor: tensor.to(self._device, copy=True))
        making = MadeOnDevice(self._device)
        with self._unchanged():
            return Captured(tensors_of(held), self._lane.capture(lambda: self._work(held, making), self._pool))

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Warm-ups train, draw and gather statistics. None of it may be left: the job must not know that this shape was new."""
        tensors = [self.network.weights.params, *self.network.module.buffers(), *self._state]
        before = [tensor.clone() for tensor in tensors]
        try:
            with rng_kept(self._device):
                yield
        finally:
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


def _cause(error: BaseException) -> str:
    """What went wrong first, in a line: the end of a broken capture is an error too, and says nothing."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]

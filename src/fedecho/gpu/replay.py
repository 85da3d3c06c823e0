"""Training steps captured once for every shape of batch and then replayed, for tasks that are not captured whole."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedecho.core.layout import BoundNetwork
from fedecho.core.randomness import rng_kept
from fedecho.core.task import Batch, Task
from fedecho.gpu.capture import Precision, compiled_update
from fedecho.gpu.compiled_blocks import CompiledBlocks, repeated_blocks
from fedecho.gpu.low_precision import Lowered, casts_of, places_of, stretches
from fedecho.gpu.streams import Graph, Lane, lane_on, memory_pool
from fedecho.learning.descent import bias_correction, wants_moments, wants_raw_mean
from fedecho.learning.local import LocalTraining

PLAIN = (bool, int, float, str, type(None))


def mapped(batch: Batch, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with every tensor changed, in a fixed order.

    >>> mapped({"x": (1, None)}, Tensor.clone)
    {'x': (1, None)}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, PLAIN):
        return batch
    if type(batch) in (tuple, list):
        return type(batch)(mapped(part, change) for part in batch)
    if type(batch) is dict:
        return {name: mapped(part, change) for name, part in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{part.name: mapped(getattr(batch, part.name), change) for part in fields(batch)})
    raise TypeError(f"its batches hold a {type(batch).__name__}")


def tensors_of(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(batch, found.append)
    return found


def shape_of(batch: Batch) -> Hashable:
    """Equal for batches that differ in nothing but the values in their tensors."""
    if isinstance(batch, Tensor):
        return (*batch.shape, batch.dtype, batch.device)
    if isinstance(batch, PLAIN):
        return type(batch), batch
    if type(batch) in (tuple, list):
        return type(batch), tuple(map(shape_of, batch))
    if type(batch) is dict:
        return tuple((name, shape_of(part)) for name, part in batch.items())
    if is_dataclass(batch) and not isinstance(batch, type):
        return type(batch), tuple(shape_of(getattr(batch, part.name)) for part in fields(batch))
    raise TypeError(f"its batches hold a {type(batch).__name__}")


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
    """Loss, backward and the optimizer as one graph; the optimizer's state is on the device.

    What ``precision`` compiles is the optimizer's step and, where the same bytes need not come out twice, the network's repeated
    layers. ``eager`` says why nothing is captured any more, or is empty.
    """

    task: Task
    local: LocalTraining
    network: BoundNetwork
    precision: Precision = field(default_factory=lambda: Precision(compiled=False))
    say: Callable[[str], None] = lambda text: None
    lane: Lane | None = None
    eager: str = field(default="", init=False)
    graphs: dict[Hashable, Captured] = field(default_factory=dict, init=False)
    lowered: Lowered | None = field(default=None, init=False)
    """The copies that linear layers compute with, once a capture has found that they may."""

    def __post_init__(self) -> None:
        params, local = self.network.weights.params, self.local
        self._device = params.device
        self._lane, self._pool = self.lane or lane_on(self._device), memory_pool(self._device)
        self._start = torch.zeros_like(params) if local.proximal else None
        self._shift = torch.zeros_like(params) if local.control_variates and not local.correct_once else None
        self._raw = torch.zeros_like(params) if wants_raw_mean(local) else None
        self._moments = (torch.zeros_like(params), torch.zeros_like(params)) if wants_moments(local) else ()
        # In float64: 1 - beta^count loses half of its digits in float32.
        self._count, self._loss = torch.zeros(2, dtype=torch.float64, device=self._device).unbind()
        self._num_steps = 1
        self._stretches = stretches(self.network.layout.params)
        self._update = compiled_update(local, self.precision)
        self._places = places_of(self.network)
        self._made_on_device = MadeOnDevice(self._device)
        # Which program a shape of batch gets hangs on the shapes before it: a resumed run could round otherwise.
        compiles = self.precision.compiled and not self.precision.deterministic
        blocks = repeated_blocks(self.network.module) if compiles else []
        self._blocks = CompiledBlocks(blocks) if blocks else None

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
        if self.lowered is not None:
            self.lowered.refresh()

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

    def _work(self, batch: Batch, way: AbstractContextManager[Any] = NOTHING) -> None:
        module, layout = self.network.module, self.network.layout
        with way, self._no_autocast():
            loss = self.task.loss(module, batch)
            leaves = [module.get_parameter(part.name) for part in layout.params]
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        self._descend(grads)
        self._loss.add_(loss.detach())

    def _no_autocast(self) -> AbstractContextManager[Any]:
        """And no cache of weights in low precision: one from before the capture would be that of old weights for ever."""
        return torch.autocast(self._device.type, enabled=False, cache_enabled=False)

    def _descend(self, grads: Sequence[Tensor | None]) -> None:
        """A step of the optimizer, a stretch at a time."""
        self._count.add_(1)
        bias = [each.float() for each in bias_correction(self.local, self._count)] if self._moments else []
        vectors, found = (self._raw, self._start, self._shift, *self._moments), iter(grads)
        for stretch in self._stretches:
            span = stretch.span
            params = self.network.weights.params[span]
            low = self.lowered.low[span] if self.lowered is not None and self.lowered.keeps(stretch.parts) else params
            grad = stretch.gradient(list(islice(found, len(stretch.parts))), params)
            self._update(params, low, grad, *(None if vector is None else vector[span] for vector in vectors), *bias)

    def _captured(self, batch: Batch) -> Captured | None:
        """The graph for batches of this shape, captured at its first use; None where the step is to be eager."""
        try:
            shape = shape_of(batch)
            if shape not in self.graphs and len(self.graphs) < MOST_GRAPHS:
                self.graphs[shape] = self._capture(batch)
                if len(self.graphs) == MOST_GRAPHS:
                    self.say(f"training is captured for {MOST_GRAPHS} shapes of batch, and eager for any other from now on")
            return self.graphs.get(shape)
        except Exception as error:
            if self._blocks is None and not isinstance(error, RuntimeError | TypeError):
                raise
            cause = _cause(error)
        self.graphs.clear()
        if self._blocks is not None:
            self._blocks = None
            captured = self._captured(batch)
            if captured is not None:
                self.say(f"the model's layers are not compiled: {cause}")
            return captured
        self.eager = f"a step of {type(self.task).__name__} cannot be captured ({cause})"
        self.lowered = None
        self.say(f"training is not captured but eager: {self.eager}")
        return None

    def _capture(self, batch: Batch) -> Captured:
        held = mapped(batch, lambda tensor: tensor.to(self._device, copy=True))
        with self._unchanged():
            names = self._cast_once(held)
            graph = self._lane.capture(lambda: self._work(held, self._captured_way(names)), self._pool)
        return Captured(tensors_of(held), graph)

    def _cast_once(self, batch: Batch) -> Collection[str]:
        """The parameters whose copies serve a batch of this shape. The first to find some decides what the copies are."""

        def forward() -> Tensor:
            return self.task.loss(self.network.module, batch)

        with self._made_on_device, self._no_autocast():
            casts = casts_of(self._places, self._device, forward)
            if self.lowered is None and len(kinds := set(casts.values())) == 1:
                self.lowered = Lowered(self.network, self._places, *kinds)
                self.graphs.clear()  # they do not keep the copies up
            if self.lowered is None:
                return []
            return self.lowered.taken([name for name, dtype in casts.items() if dtype == self.lowered.low.dtype], forward)

    @contextmanager
    def _captured_way(self, names: Collection[str]) -> Iterator[None]:
        """How a step is computed that is to be captured."""
        low = NOTHING if self.lowered is None else self.lowered.in_place(names)
        with self._made_on_device, low, NOTHING if self._blocks is None else self._blocks.at_work():
            yield

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
            if self.lowered is not None:
                self.lowered.refresh()


def _cause(error: BaseException) -> str:
    """What went wrong first, in a line: the end of a broken capture is an error too, and says nothing."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]

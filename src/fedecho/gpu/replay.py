"""Training steps captured once per batch shape and then replayed, for tasks whose training is not captured as a whole."""

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
from fedecho.gpu.low_precision import LowPrecisionCopies, linear_params, segments_of, single_casts
from fedecho.gpu.streams import Graph, Stream, memory_pool, stream_on
from fedecho.learning.descent import bias_correction, wants_moments, wants_raw_mean
from fedecho.learning.local import LocalTraining

PLAIN = (bool, int, float, str, type(None))


def map_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Any:
    """Apply ``change`` to every tensor of a batch, in a fixed order, and keep its structure.

    >>> map_tensors({"x": (1, None)}, Tensor.clone)
    {'x': (1, None)}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, PLAIN):
        return batch
    if type(batch) in (tuple, list):
        return type(batch)(map_tensors(part, change) for part in batch)
    if type(batch) is dict:
        return {name: map_tensors(part, change) for name, part in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{part.name: map_tensors(getattr(batch, part.name), change) for part in fields(batch)})
    raise TypeError(f"its batches contain a {type(batch).__name__}")


def tensors_of(batch: Batch) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_tensors(batch, tensors.append)
    return tensors


def shape_of(batch: Batch) -> Hashable:
    """Return a key that is equal for batches that differ only in the values of their tensors."""
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
    raise TypeError(f"its batches contain a {type(batch).__name__}")


MOST_GRAPHS = 256
"""Limit on captured shapes: a graph of a thousand kernels takes a few megabytes."""
FACTORIES = (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)
DRAWS = (torch.rand, torch.randint, torch.randn, torch.randperm)
NO_CONTEXT = nullcontext()


class FactoriesOnDevice(TorchFunctionMode):
    """Creates tensors on the device when a model does not name one, and scalars directly on the device it names.

    A copy from the CPU cannot be captured, and a random draw on the CPU would be made only once, during the capture. On the
    device, code that inspects a draw cannot be captured and runs eagerly, which is correct.
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
    """A captured step on a batch at fixed addresses."""

    batch: list[Tensor]
    graph: Graph

    def replay(self, batch: Batch) -> None:
        """Copy ``batch`` into place and replay the step."""
        for held, new in zip(self.batch, tensors_of(batch), strict=True):
            held.copy_(new)
        self.graph.replay()


@dataclass
class ReplayedSteps:
    """Loss, backward and optimizer step as one graph, with the optimizer state on the device.

    ``precision`` decides whether the optimizer step is compiled and, unless runs must be bit-identical, the network's repeated
    layers. ``eager`` is the reason why steps are no longer captured, or empty.
    """

    task: Task
    local: LocalTraining
    network: BoundNetwork
    precision: Precision = field(default_factory=lambda: Precision(compiled=False))
    say: Callable[[str], None] = lambda text: None
    stream: Stream | None = None
    eager: str = field(default="", init=False)
    graphs: dict[Hashable, Captured] = field(default_factory=dict, init=False)
    low_copies: LowPrecisionCopies | None = field(default=None, init=False)
    """The copies that linear layers compute with; set by the first capture that finds some usable."""

    def __post_init__(self) -> None:
        params, local = self.network.weights.params, self.local
        self._device = params.device
        self._stream, self._pool = self.stream or stream_on(self._device), memory_pool(self._device)
        self._start = torch.zeros_like(params) if local.proximal else None
        self._shift = torch.zeros_like(params) if local.control_variates and not local.correct_once else None
        self._raw = torch.zeros_like(params) if wants_raw_mean(local) else None
        self._moments = (torch.zeros_like(params), torch.zeros_like(params)) if wants_moments(local) else ()
        # In float64: 1 - beta^count would lose half of its digits in float32.
        self._count, self._loss = torch.zeros(2, dtype=torch.float64, device=self._device).unbind()
        self._num_steps = 1
        self._segments = segments_of(self.network.layout.params)
        self._update = compiled_update(local, self.precision)
        self._linear_params = linear_params(self.network)
        self._factories_on_device = FactoriesOnDevice(self._device)
        # Which program a batch shape gets depends on the shapes before it, so a resumed run could round differently.
        compiles = self.precision.compiled and not self.precision.deterministic
        blocks = repeated_blocks(self.network.module) if compiles else []
        self._blocks = CompiledBlocks(blocks) if blocks else None

    def begin(self, start: Tensor, shift: Tensor | None, num_steps: int) -> None:
        self._num_steps = num_steps
        if shift is not None and self._shift is None:
            self._shift = torch.zeros_like(shift)
            self.graphs.clear()  # captured without a shift
        for tensor in (*self._state, self._shift):
            if tensor is not None:
                tensor.zero_()
        if self._start is not None:
            self._start.copy_(start)
        if shift is not None and self._shift is not None:
            self._shift.copy_(shift)
        if self.low_copies is not None:
            self.low_copies.refresh()

    def step(self, batch: Batch) -> None:
        captured = None if self.eager else self._captured(batch)
        if captured is None:
            self._run_step(batch)
        else:
            captured.replay(batch)

    def raw_mean(self) -> Tensor | None:
        return None if self._raw is None else self._raw / self._num_steps

    def mean_loss(self) -> float:
        return float(self._loss) / self._num_steps

    @property
    def _state(self) -> list[Tensor]:
        """What a step changes besides the weights."""
        return [*self._moments, self._count, self._loss, *([] if self._raw is None else [self._raw])]

    def _run_step(self, batch: Batch, context: AbstractContextManager[Any] = NO_CONTEXT) -> None:
        module, layout = self.network.module, self.network.layout
        with context, self._no_autocast():
            loss = self.task.loss(module, batch)
            leaves = [module.get_parameter(part.name) for part in layout.params]
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        self._descend(grads)
        self._loss.add_(loss.detach())

    def _no_autocast(self) -> AbstractContextManager[Any]:
        """Disable autocast and its weight cache: an entry from before the capture would hold outdated weights for ever."""
        return torch.autocast(self._device.type, enabled=False, cache_enabled=False)

    def _descend(self, grads: Sequence[Tensor | None]) -> None:
        """Run the optimizer step, one segment at a time."""
        self._count.add_(1)
        bias = [each.float() for each in bias_correction(self.local, self._count)] if self._moments else []
        vectors, remaining = (self._raw, self._start, self._shift, *self._moments), iter(grads)
        for segment in self._segments:
            span = segment.span
            params = self.network.weights.params[span]
            copies = self.low_copies
            low = copies.low[span] if copies is not None and copies.has_copy_of(segment.parts) else params
            grad = segment.gradient(list(islice(remaining, len(segment.parts))), params)
            self._update(params, low, grad, *(None if vector is None else vector[span] for vector in vectors), *bias)

    def _captured(self, batch: Batch) -> Captured | None:
        """Return the graph for batches of this shape, captured at first use; None if the step must run eagerly."""
        try:
            shape = shape_of(batch)
            if shape not in self.graphs and len(self.graphs) < MOST_GRAPHS:
                self.graphs[shape] = self._capture(batch)
                if len(self.graphs) == MOST_GRAPHS:
                    self.say(f"training is captured for {MOST_GRAPHS} batch shapes; steps on any further shape run eagerly")
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
        self.low_copies = None
        self.say(f"training runs eagerly: {self.eager}")
        return None

    def _capture(self, batch: Batch) -> Captured:
        held = map_tensors(batch, lambda tensor: tensor.to(self._device, copy=True))
        with self._unchanged():
            names = self._cast_once(held)
            graph = self._stream.capture(lambda: self._run_step(held, self._capture_context(names)), self._pool)
        return Captured(tensors_of(held), graph)

    def _cast_once(self, batch: Batch) -> Collection[str]:
        """Return the parameters whose copies can be used for this batch shape; the first time there are any, create the copies."""

        def forward() -> Tensor:
            return self.task.loss(self.network.module, batch)

        with self._factories_on_device, self._no_autocast():
            casts = single_casts(self._linear_params, self._device, forward)
            if self.low_copies is None and len(dtypes := set(casts.values())) == 1:
                self.low_copies = LowPrecisionCopies(self.network, self._linear_params, *dtypes)
                self.graphs.clear()  # they do not update the copies
            if self.low_copies is None:
                return []
            return self.low_copies.receiving_gradients(
                [name for name, dtype in casts.items() if dtype == self.low_copies.low.dtype], forward
            )

    @contextmanager
    def _capture_context(self, names: Collection[str]) -> Iterator[None]:
        """The context in which a step is captured."""
        low = NO_CONTEXT if self.low_copies is None else self.low_copies.swapped_in(names)
        with self._factories_on_device, low, NO_CONTEXT if self._blocks is None else self._blocks.enabled():
            yield

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Undo everything that warm-up steps change (weights, statistics, random state), so that a capture leaves no trace."""
        tensors = [self.network.weights.params, *self.network.module.buffers(), *self._state]
        before = [tensor.clone() for tensor in tensors]
        try:
            with rng_kept(self._device):
                yield
        finally:
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            if self.low_copies is not None:
                self.low_copies.refresh()


def _cause(error: BaseException) -> str:
    """Return the first error in one line; the error at the end of a failed capture is only a consequence."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]

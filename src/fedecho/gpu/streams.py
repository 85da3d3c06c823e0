"""CUDA streams with captured graphs, and their CPU counterpart that runs work at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UPS = 3
"""Times work is run before it is captured. Whatever these runs change must be reloaded afterwards."""
HIGH_PRIORITY = -1
"""Priority of a stream whose kernels go first; other streams have 0."""
FAILED_GRAPHS: list[Any] = []
"""Graphs whose capture failed, kept alive because the allocator still refers to them."""


class StreamEvent(Protocol):
    """A point in a stream's queue."""

    def query(self) -> bool:
        """Whether all work before the event is done."""
        ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    def replay(self) -> None: ...


class Stream(Protocol):
    """A queue of work on a device."""

    def queue(self) -> Any:
        """Return a context that queues work on this stream."""
        ...

    def wait(self, event: StreamEvent) -> None:
        """Make later work on this stream wait for ``event``, which may belong to another stream."""
        ...

    def record(self) -> StreamEvent: ...

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        """Capture ``work`` as a graph. Graphs that never run at the same time may share a ``pool`` (see ``memory_pool``)."""
        ...


class CudaStream:
    """A CUDA stream."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)

    def queue(self) -> Any:
        return torch.cuda.stream(self._stream)

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self) -> StreamEvent:
        event: StreamEvent = self._stream.record_event()
        return event

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
            self._stream.synchronize()
            graph = self._graph(work, pool)
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _graph(self, work: Callable[[], None], pool: Any) -> Graph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                work()
        except BaseException:
            # A failed capture leaves the generator in capture mode, where nothing can draw from it; give it a new state.
            # The allocator keeps asking the graph which streams belong to it, so the graph must stay alive.
            FAILED_GRAPHS.append(graph)
            device = self._stream.device
            torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))
            raise
        return graph


class ImmediateStream:
    """A stream for the CPU that runs everything at once."""

    def queue(self) -> Any:
        return nullcontext()

    def wait(self, event: StreamEvent) -> None:
        pass

    def record(self) -> StreamEvent:
        return _CompletedEvent()

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        for _ in range(WARM_UPS):
            work()
        return _Rerun(work)


class _CompletedEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Rerun:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def stream_on(device: torch.device, *, high_priority: bool = False) -> Stream:
    """Return a stream on ``device``; high priority is for the server's work.

    The priority of the stream that captures a graph counts, not of the one that replays it: kernels keep it.
    """
    return CudaStream(device, HIGH_PRIORITY if high_priority else 0) if device.type == "cuda" else ImmediateStream()


def memory_pool(device: torch.device) -> Any:
    """Return a memory pool to share between graphs that never run at once: together they use as much as the largest."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def record_event(device: torch.device) -> StreamEvent:
    """Record an event on the caller's current stream."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else _CompletedEvent()


def hand_over(tensor: Tensor) -> None:
    """Keep the memory of a tensor made on another stream until the caller's current stream is done with it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())


def pinned_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in pinned host memory, from which copies to the device are asynchronous."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to the device without waiting for the device's queued work."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def server_stream(device: torch.device) -> Iterator[None]:
    """Run the server's work on a high-priority stream, ahead of the clients'."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.synchronize()

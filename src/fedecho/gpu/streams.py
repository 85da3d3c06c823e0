"""Where queued work runs: CUDA streams with captured graphs, or at once on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UPS = 3
"""Runs of captured work before it is captured. What it changes must be loaded anew before it counts."""


AHEAD = -1
"""The priority of a stream whose kernels go first; others have 0."""
BROKEN: list[Any] = []
"""Graphs whose capture failed."""


class Mark(Protocol):
    """A place in a lane's queue."""

    def query(self) -> bool:
        """Has everything before it been done?"""
        ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    def replay(self) -> None: ...


class Lane(Protocol):
    """A queue of work on a device."""

    def queue(self) -> Any:
        """A context: what is done inside goes into this lane's queue."""
        ...

    def wait(self, mark: Mark) -> None:
        """Later work of this lane begins after ``mark``, which may be of another lane."""
        ...

    def mark(self) -> Mark: ...

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        """``work`` as something to replay. Graphs that never run at once may share a ``pool`` (see ``memory_pool``)."""
        ...


class CudaLane:
    """A stream."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)

    def queue(self) -> Any:
        return torch.cuda.stream(self._stream)

    def wait(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def mark(self) -> Mark:
        event: Mark = self._stream.record_event()
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
            # A capture that breaks off leaves the generator waiting for its end, and then nothing can draw from it any more;
            # and the allocator goes on to ask the graph which streams are its own, so that must not vanish.
            BROKEN.append(graph)
            device = self._stream.device
            torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))
            raise
        return graph


class ImmediateLane:
    """Everything at once: a lane for the CPU."""

    def queue(self) -> Any:
        return nullcontext()

    def wait(self, mark: Mark) -> None:
        pass

    def mark(self) -> Mark:
        return _Done()

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        for _ in range(WARM_UPS):
            work()
        return _Again(work)


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def lane_on(device: torch.device, *, ahead: bool = False) -> Lane:
    """``ahead`` of the others is for the server's work.

    It matters where a graph is captured, not where it is replayed: torch has kernels keep the priority of their capture.
    """
    return CudaLane(device, AHEAD if ahead else 0) if device.type == "cuda" else ImmediateLane()


def memory_pool(device: torch.device) -> Any:
    """Memory that graphs share which never run at once: together they take what the largest of them takes."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def mark_here(device: torch.device) -> Mark:
    """The place where the caller's own work stands."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else _Done()


def hand_over(tensor: Tensor) -> None:
    """The caller goes on to use a tensor that another lane made: its memory must not be given away before."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())


def pinned_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory from which a copy to the device need not be waited for."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the CPU on the device, without waiting for what the device is still at."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def server_lane(device: torch.device) -> Iterator[None]:
    """The server works ahead of the clients: its stream has the higher priority."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=AHEAD)
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.synchronize()

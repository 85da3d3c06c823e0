"""``VirtualTransport``: sends dispatches to an executor and delivers the results in the order of a virtual clock."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from torch import Tensor

from fedecho.core.admission import norm_of
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Joined, Left, Lost, Message
from fedecho.executors.executor import Executor, Job
from fedecho.simulation.events import Event, EventQueue
from fedecho.simulation.faults import Faults
from fedecho.simulation.runtimes import ClientRuntimes
from fedecho.storage.client_memory import ClientMemory, MemoryPlace, check_folder

DROPPED = "client dropped out"
UpdateTransform = Callable[[Dispatch, ClientUpdate], ClientUpdate]
"""Transforms a client's update before it is sent, for privacy noise or an attack."""


def unchanged(dispatch: Dispatch, update: ClientUpdate) -> ClientUpdate:
    """Send the update unchanged."""
    return update


class VirtualTransport:
    """The simulated clock and network.

    A job's result depends only on (client, base version, seed), so the executor may compute it at any time. Runtimes are drawn,
    never measured: the schedule is the same for every executor, machine and algorithm.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        runtimes: ClientRuntimes,
        num_clients: int,
        seed: int,
        faults: Faults | None = None,
        client_memory: MemoryPlace = "cpu",
        client_memory_dir: str | None = None,
        sent: UpdateTransform = unchanged,
    ) -> None:
        self.executor = executor
        self._outgoing = sent
        self.runtimes = runtimes
        self.faults = faults or Faults()
        self.num_clients = num_clients
        self.seed = seed
        self.queue = EventQueue()
        self.open: dict[int, Dispatch] = {}
        check_folder(client_memory_dir, "client_memory_dir")
        self._client_memory: MemoryPlace = client_memory
        self._client_memory_dir = client_memory_dir
        self._controls: ClientMemory | None = None
        if self.faults.has_spells:
            self.queue.put_all([self.faults.spell(seed, client, 0) for client in range(num_clients)], "leave")

    @property
    def now(self) -> float:
        return self.queue.now

    def send(self, dispatch: Dispatch) -> None:
        runtime = self.runtimes.draw(dispatch.client, dispatch.number)
        drop = self.faults.drop_after(runtime, self.seed, dispatch.number)
        self.open[dispatch.client] = dispatch
        if drop is not None:
            self.queue.put(self.now + drop, Event("drop", dispatch.client, dispatch.number))
            return
        due = self.now + runtime
        self.queue.put(due, Event("finish", dispatch.client, dispatch.number))
        self._submit(dispatch, due)

    def receive(self) -> Message:
        while True:
            message = self._message(self.queue.pop())
            if message is not None:
                return message

    def _submit(self, dispatch: Dispatch, due: float) -> None:
        control = None
        if self._controls is not None and dispatch.client in self._controls:
            control = self._controls[dispatch.client]
        self.executor.submit(Job(dispatch, control), due)

    def _message(self, event: Event) -> Message | None:
        if event.kind == "join":
            self.queue.put(self.now + self._spell(event), Event("leave", event.client, event.number + 1))
            return Joined(event.client)
        if event.kind == "leave":
            self.queue.put(self.now + self._spell(event), Event("join", event.client, event.number + 1))
            self._abandon(event.client)
            return Left(event.client)
        dispatch = self.open.get(event.client)
        if dispatch is None or dispatch.number != event.number:
            return None  # the client left first
        del self.open[event.client]
        if event.kind == "drop":
            return Lost(event.client, DROPPED, DROPPED)
        return self._outgoing(dispatch, self._remember(self.executor.result(dispatch.number)))

    def _spell(self, event: Event) -> float:
        return self.faults.spell(self.seed, event.client, event.number + 1)

    def _abandon(self, client: int) -> None:
        dispatch = self.open.pop(client, None)
        if dispatch is not None:
            self.executor.cancel(dispatch.number)

    def _remember(self, update: ClientUpdate) -> ClientUpdate:
        """Update the client's memory between jobs: c_i <- c_i + dc_i."""
        if update.correction is not None and isfinite(norm_of(update.correction)):
            if self._controls is None:
                self._controls = self._memory(update.correction)
            self._controls[update.client] = self._controls[update.client] + update.correction
        return update

    def _memory(self, like: Tensor) -> ClientMemory:
        return ClientMemory(self.num_clients, like, self._client_memory, self._client_memory_dir, setting="client_memory_dir")

    def snapshot(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        dispatched = {client: [d.number, d.model.version, d.seed] for client, d in self.open.items()}
        controls = None if self._controls is None else self._controls.to_tree()
        return {"queue": self.queue.to_tree(), "open": dispatched, "controls": controls}

    def restore(self, tree: Mapping[str, Any], models: Mapping[int, GlobalModel]) -> None:
        """Restore a snapshot. Jobs that were in progress are submitted again; their results are bit-identical."""
        self.queue.from_tree(tree["queue"])
        if tree["controls"] is not None:
            like = next(iter(models.values())).weights.params
            self._controls = self._memory(like).from_tree(tree["controls"])
        self.open = {
            client: Dispatch(number, client, models[version], seed) for client, (number, version, seed) in tree["open"].items()
        }
        for due, _, event in self.queue.entries():
            dispatch = self.open.get(event.client)
            if event.kind == "finish" and dispatch is not None and dispatch.number == event.number:
                self._submit(dispatch, due)

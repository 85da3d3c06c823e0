"""Several clients at once on one GPU, each on its own stream."""

from collections.abc import Set
from heapq import heappop, heappush

from fedecho.core.lanes import Mark, mark_here
from fedecho.core.types import ClientUpdate
from fedecho.simulation.executors.captured import Plan, Running, Slot
from fedecho.simulation.executors.executor import Job

DEPTH = 2
"""Jobs a slot holds at once: it goes on while the host waits for a result or distils."""


class CudaExecutor:
    """Jobs start in the order they are due on the slot with the least work before it."""

    def __init__(self, plan: Plan, *, num_slots: int = 6, wanted: Set[int] | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"workers must be at least 1, got {num_slots}")
        self._wanted = wanted
        self._device = plan.device
        self.slots = [Slot(plan) for _ in range(num_slots)]
        self._jobs: dict[int, tuple[Job, Mark]] = {}
        self._pending: list[tuple[float, int]] = []
        self._running: dict[int, tuple[int, Running]] = {}

    def submit(self, job: Job, due: float) -> None:
        number = job.dispatch.number
        self._jobs[number] = (job, mark_here(self._device))
        if self._wanted is None or number in self._wanted:
            heappush(self._pending, (due, number))
            self._pump()

    def result(self, number: int) -> ClientUpdate:
        if number in self._jobs:
            self._start(number)
        slot, running = self._running.pop(number)
        update = self.slots[slot].update_of(running)
        self._pump()
        return update

    def cancel(self, number: int) -> None:
        if self._jobs.pop(number, None) is None:
            self._running.pop(number, None)

    def close(self) -> None:
        for _, running in self._running.values():
            running.done.synchronize()
        self.slots.clear()
        self._jobs.clear()
        self._running.clear()

    def _pump(self) -> None:
        """Start what is due next while a slot has room. A result that waits for its time takes up none."""
        loads = self._loads()
        while self._pending and min(len(load) for load in loads) < DEPTH:
            number = heappop(self._pending)[1]
            if number in self._jobs:
                self._start(number)
                loads = self._loads()

    def _start(self, number: int) -> None:
        job, ready = self._jobs.pop(number)
        loads = self._loads()
        slot = min(range(len(loads)), key=lambda one: (len(loads[one]), sum(loads[one])))
        self._running[number] = (slot, self.slots[slot].begin(job, ready))

    def _loads(self) -> list[list[int]]:
        """For each slot, the steps of its jobs that have not finished."""
        loads: list[list[int]] = [[] for _ in self.slots]
        for slot, running in self._running.values():
            if not running.done.query():
                loads[slot].append(running.num_steps)
        return loads

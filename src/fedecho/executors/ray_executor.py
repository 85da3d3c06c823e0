"""Actors on a Ray cluster, one for each core or GPU; the weights of a version lie once in its object store."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray import ObjectRef, cloudpickle
from ray.exceptions import ObjectStoreFullError, RayError

from fedecho.core.types import ClientUpdate, GlobalModel
from fedecho.executors.executor import CPU, Bench, Job
from fedecho.executors.ray_actor import Array, Arrays, Errand, Hello, Parcel, Seat, Surroundings, arrays_of, software
from fedecho.executors.ray_cluster import LOOK_S, Cluster, alive_nodes
from fedecho.executors.worker import Failed
from fedecho.executors.worker_pool import DEPTH, Crew, WorkerError
from fedecho.learning.trainer import Trainer

ASKED = 2
"""Results that are asked of a GPU's actor at once: the next is on its way while one is taken up."""
TELL_S = 30.0
PATIENCE_S = 600.0
"""How long to wait, with nobody at work, for room in the cluster."""


@dataclass(slots=True)
class _Actor:
    handle: Any
    starting: ObjectRef[Any] | None
    """Until it has said hello; it gets no orders before."""
    hello: Hello | None = None
    orders: dict[int, tuple[Job, Errand]] = field(default_factory=dict)
    asked: dict[ObjectRef[Any], int] = field(default_factory=dict)
    taken: deque[int] = field(default_factory=deque)
    """Given to it, and the result not yet asked for."""

    @property
    def load(self) -> int:
        return len(self.orders)


class RayExecutor(Crew[_Actor]):
    """A lost actor or node is replaced where there is room, and its jobs run again. Actors without room join when there is."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        make_trainer: Callable[[], Trainer | Bench],
        wanted: Set[int] | None = None,
        depth: int = DEPTH,
        device: torch.device = CPU,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(num_workers=cluster.num_workers, wanted=wanted, depth=depth)
        self._cluster = cluster
        self._device = device
        self._say = say
        self._models: dict[int, ObjectRef[Arrays]] = {}
        self._waited_s = 0.0
        self.num_stored = 0
        on_gpu = cluster.resource == "GPU"
        self._overlapping = on_gpu
        room = {"num_cpus": 0, "num_gpus": 1} if on_gpu else {"num_cpus": 1}
        self._seat = ray.remote(Seat).options(**room)
        try:
            self._arguments = (cloudpickle.dumps(make_trainer), Surroundings.here())
            self._workers = [self._hire() for _ in range(cluster.num_workers)]
            while not self._ready():  # what cannot start is told before anything else is done
                self._collect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            _dismiss(worker)
        self._workers.clear()
        self._models.clear()
        self._cluster.close()

    def _hire(self) -> _Actor:
        handle = self._seat.remote(*self._arguments)
        return _Actor(handle, handle.hello.remote())

    def _ready(self) -> list[_Actor]:
        return [worker for worker in self._workers if worker.starting is None]

    def _order(self, worker: _Actor, job: Job) -> None:
        dispatch = job.dispatch
        errand = Errand(dispatch.number, dispatch.client, dispatch.model.version, dispatch.seed)
        control = None if job.control is None else job.control.cpu().numpy()
        worker.orders[errand.number] = (job, errand)
        if self._overlapping:
            worker.handle.take.remote(errand, self._stored(dispatch.model), control)
            worker.taken.append(errand.number)
        else:
            worker.asked[worker.handle.run.remote(errand, self._stored(dispatch.model), control)] = errand.number

    def _stored(self, model: GlobalModel) -> ObjectRef[Arrays]:
        """The model in the object store: put there once, and let go when the last who holds the version lets go of it."""
        if model.version not in self._models:
            params = model.weights.params
            try:
                self._models[model.version] = ray.put(arrays_of(params, model.weights.buffers, model.correction))
            except ObjectStoreFullError as error:
                raise WorkerError(f"Ray's object store on this machine has no room for a model: {error}") from None
            weakref.finalize(params, self._models.pop, model.version, None).atexit = False
            self.num_stored += 1
        return self._models[model.version]

    def _collect(self) -> None:
        for worker in self._workers:
            while worker.taken and len(worker.asked) < ASKED:
                number = worker.taken.popleft()
                worker.asked[worker.handle.give.remote(worker.orders[number][1])] = number
        by_ref = {ref: worker for worker in self._workers for ref in worker.asked}
        at_work = bool(by_ref)
        by_ref |= {worker.starting: worker for worker in self._workers if worker.starting is not None}
        began = time.monotonic()
        done, _ = ray.wait(list(by_ref), timeout=LOOK_S)
        self._cluster.check_head()
        for ref in done:
            self._heard(by_ref[ref], ref)
        if done or at_work:
            self._waited_s = 0.0
            return
        before = self._waited_s
        self._waited_s += time.monotonic() - began
        if self._waited_s // TELL_S > before // TELL_S:
            self._complain()

    def _complain(self) -> None:
        what = f"no room for a worker in the Ray cluster ({len(alive_nodes())} nodes) for {self._waited_s:.0f} s"
        if self._waited_s >= PATIENCE_S:
            raise WorkerError(f"{what}; a run that had begun can be resumed")
        self._say(f"{what}; waiting for one")

    def _heard(self, worker: _Actor, ref: ObjectRef[Any]) -> None:
        try:
            found = ray.get(ref)
        except RayError as error:  # the actor, its node, or what it had put into its node's store
            self._replace(worker, error)
            return
        if ref == worker.starting:
            self._welcome(worker, found)
            return
        number = worker.asked.pop(ref)
        job, _ = worker.orders.pop(number)
        self._settle(number, found if isinstance(found, Failed) else self._update(job, found))

    def _welcome(self, worker: _Actor, hello: Hello | str) -> None:
        if isinstance(hello, str):
            raise WorkerError.told("a worker could not start", hello)
        ours, theirs = software(), hello.software
        other = [f"{name} {theirs[name]} and not {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if other:
            raise WorkerError(f"the Ray node {hello.host} has {', '.join(other)}: install the same on every node")
        worker.starting, worker.hello = None, hello
        self._begun()

    def _update(self, job: Job, parcel: Parcel) -> ClientUpdate:
        delta, buffers, correction = parcel.arrays
        return ClientUpdate(
            client=job.dispatch.client,
            base_version=job.dispatch.model.version,
            delta=self._copied(delta),
            buffers=self._copied(buffers),
            num_examples=parcel.num_examples,
            num_steps=parcel.num_steps,
            correction=None if correction is None else self._copied(correction),
            metrics=parcel.metrics,
        )

    def _copied(self, array: Array) -> torch.Tensor:
        """Out of the object store, which would fill up with what an algorithm keeps."""
        return torch.tensor(array, device=self._device)

    def _replace(self, lost: _Actor, error: RayError) -> None:
        _dismiss(lost)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0]
        if getattr(error, "actor_init_failed", False):
            raise WorkerError(f"a node of the Ray cluster cannot start a worker ({lines[-1]}): is the same installed there?")
        if lost.starting is not None:
            self._false_start(reason)
        for job, _ in lost.orders.values():
            self._put_back(job, reason)
        self._workers[self._workers.index(lost)] = self._hire()
        where = "" if lost.hello is None else f" on {lost.hello.host}"
        self._say(f"a worker{where} was lost: another takes its place, its {len(lost.orders)} jobs run again ({reason})")


def _dismiss(worker: _Actor) -> None:
    with suppress(RayError):
        ray.kill(worker.handle)

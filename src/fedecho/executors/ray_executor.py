"""Runs jobs on Ray actors, one per core or GPU. Each model version is stored once in Ray's object store."""

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
from fedecho.executors.executor import CPU, Job, JobRunner
from fedecho.executors.ray_actor import Actor, ActorInfo, Array, Arrays, Environment, JobRequest, JobResult, arrays_of, software
from fedecho.executors.ray_cluster import CHECK_INTERVAL_S, Cluster, alive_nodes
from fedecho.executors.worker import Failed
from fedecho.executors.worker_pool import DEPTH, WorkerError, WorkerPool
from fedecho.learning.trainer import Trainer

FETCHED_AT_ONCE = 2
"""Results requested from a GPU actor at once: one is in transit while another is processed."""
REPORT_INTERVAL_S = 30.0
PATIENCE_S = 600.0
"""How long to wait for resources in the cluster while no actor is working."""


@dataclass(slots=True)
class _Worker:
    handle: Any
    starting: ObjectRef[Any] | None
    """Pending call to ``info``; the actor gets no orders until it has answered."""
    info: ActorInfo | None = None
    orders: dict[int, tuple[Job, JobRequest]] = field(default_factory=dict)
    fetching: dict[ObjectRef[Any], int] = field(default_factory=dict)
    unfetched: deque[int] = field(default_factory=deque)
    """Jobs it has started whose result has not been requested yet."""

    @property
    def load(self) -> int:
        return len(self.orders)


class RayExecutor(WorkerPool[_Worker]):
    """Runs jobs on Ray actors. Lost actors are replaced and their jobs run again; actors wait until the cluster has resources."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        make_trainer: Callable[[], Trainer | JobRunner],
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
        self._overlapping = on_gpu = cluster.resource == "GPU"
        resources = {"num_cpus": 0, "num_gpus": 1} if on_gpu else {"num_cpus": 1}
        self._actor_class = ray.remote(Actor).options(**resources)
        try:
            self._arguments = (cloudpickle.dumps(make_trainer), Environment.current())
            self._workers = [self._start_worker() for _ in range(cluster.num_workers)]
            while not self._ready():  # fail before any work is done if a worker cannot start
                self._collect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            _kill(worker)
        self._workers.clear()
        self._models.clear()
        self._cluster.close()

    def _start_worker(self) -> _Worker:
        handle = self._actor_class.remote(*self._arguments)
        return _Worker(handle, handle.info.remote())

    def _ready(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.starting is None]

    def _order(self, worker: _Worker, job: Job) -> None:
        dispatch = job.dispatch
        request = JobRequest(dispatch.number, dispatch.client, dispatch.model.version, dispatch.seed)
        control = None if job.control is None else job.control.cpu().numpy()
        worker.orders[request.number] = (job, request)
        if self._overlapping:
            worker.handle.start.remote(request, self._stored(dispatch.model), control)
            worker.unfetched.append(request.number)
        else:
            worker.fetching[worker.handle.run.remote(request, self._stored(dispatch.model), control)] = request.number

    def _stored(self, model: GlobalModel) -> ObjectRef[Arrays]:
        """Return the model in the object store: stored once, and released when no one holds the version any more."""
        if model.version not in self._models:
            params = model.weights.params
            try:
                self._models[model.version] = ray.put(arrays_of(params, model.weights.buffers, model.correction))
            except ObjectStoreFullError as error:
                raise WorkerError(f"Ray's object store on this machine is too full for a model: {error}") from None
            weakref.finalize(params, self._models.pop, model.version, None).atexit = False
            self.num_stored += 1
        return self._models[model.version]

    def _collect(self) -> None:
        for worker in self._workers:
            while worker.unfetched and len(worker.fetching) < FETCHED_AT_ONCE:
                number = worker.unfetched.popleft()
                worker.fetching[worker.handle.finish.remote(worker.orders[number][1])] = number
        by_ref = {ref: worker for worker in self._workers for ref in worker.fetching}
        at_work = bool(by_ref)
        by_ref |= {worker.starting: worker for worker in self._workers if worker.starting is not None}
        began = time.monotonic()
        done, _ = ray.wait(list(by_ref), timeout=CHECK_INTERVAL_S)
        self._cluster.check_head()
        for ref in done:
            self._handle(by_ref[ref], ref)
        if done or at_work:
            self._waited_s = 0.0
            return
        before = self._waited_s
        self._waited_s += time.monotonic() - began
        if self._waited_s // REPORT_INTERVAL_S > before // REPORT_INTERVAL_S:
            self._report_waiting()

    def _report_waiting(self) -> None:
        what = f"the Ray cluster ({len(alive_nodes())} nodes) has had no resources for a worker for {self._waited_s:.0f} s"
        if self._waited_s >= PATIENCE_S:
            raise WorkerError(f"{what}; free some, then resume the run")
        self._say(f"{what}; waiting")

    def _handle(self, worker: _Worker, ref: ObjectRef[Any]) -> None:
        try:
            answer = ray.get(ref)
        except RayError as error:  # lost: the actor, its node, or an object in its node's store
            self._replace(worker, error)
            return
        if ref == worker.starting:
            self._started(worker, answer)
            return
        number = worker.fetching.pop(ref)
        job, _ = worker.orders.pop(number)
        self._settle(number, answer if isinstance(answer, Failed) else self._update(job, answer))

    def _started(self, worker: _Worker, info: ActorInfo | str) -> None:
        if isinstance(info, str):
            raise WorkerError.from_worker("a worker could not start", info)
        ours, theirs = software(), info.software
        different = [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if different:
            raise WorkerError(f"the Ray node {info.host} has {', '.join(different)}: install the same software on every node")
        worker.starting, worker.info, self._false_starts = None, info, 0

    def _update(self, job: Job, result: JobResult) -> ClientUpdate:
        delta, buffers, correction = result.arrays
        return ClientUpdate(
            client=job.dispatch.client,
            base_version=job.dispatch.model.version,
            delta=self._copied(delta),
            buffers=self._copied(buffers),
            num_examples=result.num_examples,
            num_steps=result.num_steps,
            correction=None if correction is None else self._copied(correction),
            metrics=result.metrics,
        )

    def _copied(self, array: Array) -> torch.Tensor:
        """Copy out of the object store, which would otherwise fill up with updates that an algorithm keeps."""
        return torch.tensor(array, device=self._device)

    def _replace(self, lost: _Worker, error: RayError) -> None:
        _kill(lost)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0]
        if getattr(error, "actor_init_failed", False):
            raise WorkerError(f"a node of the Ray cluster cannot start a worker ({lines[-1]}): install the same software there")
        if lost.starting is not None:
            self._false_start(reason)
        for job, _ in lost.orders.values():
            self._put_back(job, reason)
        self._workers[self._workers.index(lost)] = self._start_worker()
        where = "" if lost.info is None else f" on {lost.info.host}"
        self._say(f"lost a worker{where}: replacing it and running its {len(lost.orders)} jobs again ({reason})")


def _kill(worker: _Worker) -> None:
    with suppress(RayError):
        ray.kill(worker.handle)

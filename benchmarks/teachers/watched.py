"""Run a method unchanged and measure how accurate the mean of its clients' latest logits would be as a teacher."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedecho.core.algorithm import Demands, demands
from fedecho.core.types import Advance, Arrival, GlobalModel, Weights
from fedecho.distill.bank import Bank
from fedecho.distill.student import Student
from fedecho.runs.config import load
from fedecho.runs.record import read_header, read_record
from fedecho.runs.run import simulate
from fedecho.tasks.data_files import MRPC_FILES
from fedecho.tasks.text.mrpc import MrpcTask
from fedecho.tasks.text.readers import read_pairs
from fedecho.tasks.text.shared import file_of


@dataclass(frozen=True, slots=True)
class Watching:
    inner: Any
    bank: Bank


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Any method; beside it the plain mean of all clients' latest logits on ``judge``, and how right it is."""

    inner: Any
    labels: Tensor
    judge: Student | None = None
    task: MrpcTask | None = None
    """Whose unlabeled set is the validation pairs."""

    @property
    def demands(self) -> Demands:
        return demands(self.inner)

    @property
    def distiller(self) -> Any:
        return getattr(self.inner, "distiller", None)

    @property
    def buffer_size(self) -> int:
        return int(self.inner.buffer_size)

    def attached(self, student: Student) -> "Watched":
        assert self.task is not None
        placed = self.task.on(str(student.device))
        if student.device.type == "cuda":
            placed = placed.computing_in(torch.bfloat16)
        judge = Student(student.network, placed.logits, len(self.labels), student.chunk)
        inner = self.inner.attached(student) if hasattr(self.inner, "attached") else self.inner
        return replace(self, inner=inner, judge=judge, labels=self.labels.to(student.device))

    def init(self, model: GlobalModel) -> Watching:
        judge = self._judge
        return Watching(self.inner.init(model), Bank(judge.num_unlabeled, judge.num_classes(), judge.device))

    def receive(self, state: Watching, arrival: Arrival) -> Watching:
        update = arrival.update
        client_model = Weights(arrival.base.weights.params + update.delta, update.buffers)
        state.bank.put(update.client, self._judge.infer(client_model), arrival.current.version)
        return replace(state, inner=self.inner.receive(state.inner, arrival))

    def ready(self, state: Watching) -> bool:
        return bool(self.inner.ready(state.inner))

    def advance(self, state: Watching, model: GlobalModel) -> Advance[Watching]:
        step = self.inner.advance(state.inner, model)
        ours = self._judge.infer(step.weights)
        # Where no client has said anything finite yet, there is no teacher but the model.
        spoken = list(state.bank.entries.values())
        teacher = state.bank.teacher() if spoken else ours
        clients = fmean(map(self._right, spoken or [ours]))
        seen = {"judged_model": self._right(ours), "judged_teacher": self._right(teacher), "judged_clients": clients}
        seen |= {"model_says_1": _says_1(ours), "teacher_says_1": _says_1(teacher)}
        return Advance(replace(state, inner=step.state), step.weights, step.correction, {**step.metrics, **seen})

    @property
    def _judge(self) -> Student:
        assert self.judge is not None
        return self.judge

    def _right(self, logits: Tensor) -> float:
        return float((logits.argmax(dim=-1) == self.labels).float().mean())


def _says_1(logits: Tensor) -> float:
    return float((logits.argmax(dim=-1) == 1).float().mean())


@dataclass(frozen=True)
class Run:
    """Accuracies on the validation pairs at every version; ``clients`` is the mean of the latest of each.

    ``evaluations`` are the run's own, on the same pairs in other batches; ``model_files``, ``execution`` and ``model_sha256`` say
    what it began with, what it ran on and where it ended (runs of before have none of these).
    """

    model_name: str
    algorithm: str
    settings: list[str]
    seed: int
    model: list[float]
    teacher: list[float]
    clients: list[float]
    model_says_1: list[float]
    teacher_says_1: list[float]
    evaluations: list[float] = field(default_factory=list)
    model_files: str = ""
    execution: dict[str, Any] = field(default_factory=dict)
    model_sha256: str = ""


def watched_run(model: str, algorithm: str, settings: Sequence[str], seed: int, executor: Any) -> Run:
    experiment = load("mrpc", algorithm=algorithm, seed=seed, settings=(f"task.model={model}", *settings))
    task: Any = experiment.task
    labels = torch.tensor(
        [pair.label for pair in read_pairs(file_of("task.dev", task.dev, MRPC_FILES, task.data_dir), labelled=True)]
    )
    judged = replace(task, unlabeled=task.dev, unlabeled_size="all")
    method: Any = Watched(inner=experiment.algorithm, labels=labels, task=judged)
    with TemporaryDirectory() as folder:
        result = simulate(replace(experiment, algorithm=method), out=folder, executor=executor, checkpoint_s=3600, say=print)
        lines = [line for line in read_record(Path(folder)) if line["event"] == "version"]
        execution = read_header(Path(folder))["execution"]
    names = ("judged_model", "judged_teacher", "judged_clients", "model_says_1", "teacher_says_1")
    return Run(
        Path(model).name,
        algorithm,
        list(settings),
        seed,
        *([line[name] for line in lines] for name in names),
        evaluations=[line["accuracy"] for line in result.evaluations],
        model_files=task.model_files,
        execution=execution,
        model_sha256=result.summary.model_sha256,
    )

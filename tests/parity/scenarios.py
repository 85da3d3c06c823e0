"""Arrivals and small models that the tests of this folder feed to the package and to the oracle alike."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import torch
from torch import Tensor, nn

from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.types import Arrival, ClientUpdate, GlobalModel, Weights
from fedecho.distill.distiller import Distiller
from fedecho.distill.student import Student

NUM_CLIENTS, BUFFER_SIZE, NUM_VERSIONS = 6, 4, 50
CLASSES, FEATURES, NUM_UNLABELED = 3, 4, 23
EXAMPLES = (10, 99, 3, 40, 1, 7)
"""Of each client: whoever must not count them, does not."""
NUM_PARAMS = CLASSES * FEATURES + CLASSES


@contextmanager
def one_thread() -> Iterator[None]:
    """Sharing a multiplication of 5 x 4 numbers between threads takes seconds when the machine is busy with something else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def single(values: np.ndarray) -> np.ndarray:
    """float64 numbers that float32 holds exactly: CA2FL's cache is float32, and rounding its input is not what is tested."""
    return values.astype(np.float32).astype(np.float64)


def first_model(seed: int = 0) -> oracle.Model:
    rng = np.random.default_rng(seed)
    return oracle.Model(single(rng.normal(size=NUM_PARAMS)), single(rng.normal(size=FEATURES)), np.zeros(NUM_PARAMS))


def draw_sent(rng: np.random.Generator, client: int, base: int) -> oracle.Sent:
    """A random update. Every client pulls its own way, so that who was heard, and when, shows in the result."""
    pull = np.sin(np.arange(NUM_PARAMS) * (client + 1.0))
    delta = 0.1 * pull + 0.2 * rng.normal(size=NUM_PARAMS)
    buffers, correction = rng.normal(size=FEATURES), rng.normal(size=NUM_PARAMS)
    return oracle.Sent(client, base, single(delta), single(buffers), single(correction), EXAMPLES[client % len(EXAMPLES)])


def draw_rounds(
    seed: int = 0, num_versions: int = NUM_VERSIONS, buffer_size: int = BUFFER_SIZE, *, fresh: bool = False
) -> list[list[oracle.Sent]]:
    """Random clients (often twice in one buffer) from random versions, at most 12 ago; ``fresh``: all from the current one."""
    rng = np.random.default_rng(seed + 1)

    def base(t: int) -> int:
        return t if fresh else max(0, t - int(rng.integers(0, 13)))

    return [[draw_sent(rng, int(rng.integers(NUM_CLIENTS)), base(t)) for _ in range(buffer_size)] for t in range(num_versions)]


def tensor(values: np.ndarray, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def published(model: oracle.Model, dtype: torch.dtype = torch.float64, version: int = 0) -> GlobalModel:
    return GlobalModel(version, Weights(tensor(model.params, dtype), tensor(model.buffers, dtype)))


def update_of(sent: oracle.Sent, dtype: torch.dtype = torch.float64) -> ClientUpdate:
    tensors = (tensor(part, dtype) for part in (sent.delta, sent.buffers, sent.correction))
    delta, buffers, correction = tensors
    return ClientUpdate(sent.client, sent.base, delta, buffers, num_examples=sent.examples, num_steps=1, correction=correction)


@one_thread()
def play(
    algorithm: Any, first: oracle.Model, rounds: Sequence[Sequence[oracle.Sent]], dtype: torch.dtype = torch.float64
) -> list[GlobalModel]:
    """All versions the package makes of these arrivals, through the protocol alone."""
    models = [published(first, dtype)]
    state = algorithm.init(models[0])
    for arrivals in rounds:
        for sent in arrivals:
            assert not algorithm.ready(state)
            state = algorithm.receive(state, Arrival(update_of(sent, dtype), models[sent.base], models[-1]))
        assert algorithm.ready(state)
        advance = algorithm.advance(state, models[-1])
        state = advance.state
        models.append(GlobalModel(models[-1].version + 1, advance.weights, advance.correction))
    return models


def assert_same(models: Sequence[GlobalModel], versions: Sequence[oracle.Model], tolerance: float) -> None:
    """Every version, entry by entry: max |package - oracle| <= tolerance, absolute (entries are of order 1)."""
    assert len(models) == len(versions)
    for model, version in zip(models, versions, strict=True):
        pairs = [(model.weights.params, version.params), (model.weights.buffers, version.buffers)]
        if model.correction is not None:
            pairs.append((model.correction, version.correction))
        for ours, theirs in pairs:
            gap = np.abs(ours.double().numpy() - theirs).max()
            assert gap <= tolerance, f"version {model.version} is {gap:.3g} away"


class ShiftedLinear(nn.Module):
    """z = (u - shift) W^T + b, the oracle's ``Linear``: the shift is a running statistic, W and b are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("shift", torch.zeros(FEATURES))

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows - self.shift)


def unlabeled(seed: int = 0) -> np.ndarray:
    """U, small enough for teachers that stay unsure, so that alpha moves between its ends."""
    return single(0.5 * np.random.default_rng(seed + 2).normal(size=(NUM_UNLABELED, FEATURES)))


def bound(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> BoundNetwork:
    """A network in the given precision: modules and layouts make their tensors in torch's default one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = make()
        return Layout.of(module).bind(module)
    finally:
        torch.set_default_dtype(before)


def linear_student(inputs: np.ndarray, dtype: torch.dtype = torch.float64) -> Student:
    network, rows_of_u = bound(ShiftedLinear, dtype), tensor(inputs, dtype)
    # A chunk that does not divide |U|, so that inference is put together from unequal pieces.
    return Student(network, lambda net, rows: net(rows_of_u[rows]), len(inputs), chunk=7)


@dataclass(frozen=True, kw_only=True)
class Recording(Distiller):
    """A distiller that notes its mini-batches: the oracle takes them as given."""

    seen: list[list[np.ndarray]] = field(default_factory=list, compare=False)

    def _batches(self, student: Student, seed: int) -> list[Tensor]:
        batches = super()._batches(student, seed)
        self.seen.append([rows.numpy() for rows in batches])
        return batches

"""Replayed steps beside the plain trainer: on the CPU, where what was recorded is made again as a GPU would."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from blobs import Blobs, dispatch_of, network, trainer_of
from recorded import RecordingStream
from torch import Tensor, nn

from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate
from fedecho.gpu import replay as module_under_test
from fedecho.gpu.capture import Precision, compiled_update
from fedecho.gpu.replay import FactoriesOnDevice, ReplayedSteps, map_tensors, shape_of, tensors_of
from fedecho.gpu.streams import Graph, ImmediateStream
from fedecho.learning import LocalTraining, Trainer
from fedecho.learning.descent import adamw_step, bias_correction

ADAMW = LocalTraining(optimizer="adamw", client_lr=0.01, epochs=3, batch_size=4, weight_decay=0.1, beta1=0.6, beta2=0.9)
SGD = LocalTraining(client_lr=0.1, epochs=3, batch_size=4, weight_decay=0.01)


class CountingLane(RecordingStream):
    def __init__(self) -> None:
        self.captures = 0

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        self.captures += 1
        return super().capture(work, pool)


def replayed_of(module: nn.Module, local: LocalTraining, jitter: float = 0.0, **options: Any) -> Trainer:
    copy = deepcopy(module)
    bound, task = Layout.of(copy).bind(copy), Blobs(jitter)
    return Trainer(task, local, bound, ReplayedSteps(task, local, bound, **{"stream": RecordingStream(), **options}))


def same(ours: ClientUpdate, plain: ClientUpdate) -> None:
    torch.testing.assert_close(ours.delta, plain.delta, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours.buffers, plain.buffers) or torch.allclose(ours.buffers, plain.buffers, rtol=1e-6, atol=1e-7)
    assert ours.metrics["train_loss"] == pytest.approx(plain.metrics["train_loss"], rel=1e-6)
    assert (ours.correction is None) is (plain.correction is None)
    if ours.correction is not None and plain.correction is not None:
        torch.testing.assert_close(ours.correction, plain.correction, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("local", [SGD, ADAMW, replace(SGD, proximal=0.7), replace(ADAMW, proximal=0.7)])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_replayed_steps_are_the_plain_ones(local: LocalTraining, dropout: float) -> None:
    """Client 1 has batches of 4, 4 and 3: the shape that comes third is captured in the middle of an epoch."""
    module = network(dropout)
    ours, plain = replayed_of(module, local, jitter=0.2), trainer_of(module, local, jitter=0.2)
    for seed in (5, 6):
        dispatch = dispatch_of(module, seed=seed)
        same(ours.train(dispatch), plain.train(dispatch))


@pytest.mark.parametrize(
    "local",
    [
        SGD,
        ADAMW,
        replace(ADAMW, correct_unseen=False),
        replace(ADAMW, corrected="step"),
        replace(SGD, correct_once=True),
        replace(ADAMW, correct_once=True),
    ],
)
@pytest.mark.parametrize("control", [True, False])
def test_with_control_variates(local: LocalTraining, control: bool) -> None:
    module, rng = network(), torch.Generator().manual_seed(0)
    local = replace(local, control_variates=True)
    size = Layout.of(module).num_params
    correction, mine = torch.randn(size, generator=rng), torch.randn(size, generator=rng) if control else None
    dispatch = dispatch_of(module, correction=correction)
    ours = replayed_of(module, local)
    got = ours.train(dispatch, mine)
    same(got, trainer_of(module, local).train(dispatch, mine))
    kept = got.correction.clone()  # type: ignore[union-attr]
    plain = dispatch_of(module, seed=9)
    same(ours.train(plain), trainer_of(module, local).train(plain))
    assert torch.equal(kept, got.correction), "the next job wrote into what was handed out"


def test_a_shift_that_nobody_announced() -> None:
    module = network()
    shift = torch.full((Layout.of(module).num_params,), 0.3)
    ours, plain = replayed_of(module, SGD), trainer_of(module, SGD)
    for dispatch in (dispatch_of(module), dispatch_of(module, correction=shift), dispatch_of(module, seed=2)):
        same(ours.train(dispatch), plain.train(dispatch))


@pytest.mark.parametrize("local", [SGD, ADAMW])
def test_a_job_does_not_know_whether_its_shapes_were_new(local: LocalTraining) -> None:
    """With dropout and running statistics, which warm-ups move: a fresh trainer and one that has seen it all, to the last bit."""
    module, stream = network(0.4), CountingLane()
    seasoned = replayed_of(module, local, jitter=0.2, stream=stream)
    for client, seed in ((1, 5), (4, 8), (2, 1)):
        seasoned.train(dispatch_of(module, client=client, seed=seed))
    seen = stream.captures
    dispatch = dispatch_of(module, client=1, seed=7)
    again, fresh = seasoned.train(dispatch), replayed_of(module, local, jitter=0.2).train(dispatch)
    assert stream.captures == seen, "it had seen all shapes of this client"
    assert torch.equal(again.delta, fresh.delta)
    assert torch.equal(again.buffers, fresh.buffers)
    assert again.metrics == fresh.metrics


def test_a_graph_for_each_shape_and_no_more() -> None:
    """Clients of 10, 11 and 14 examples in batches of 4: 4, 3 and 2 rows."""
    module, stream = network(), CountingLane()
    trainer = replayed_of(module, SGD, stream=stream)
    for client in (0, 1, 4, 0, 1):
        trainer.train(dispatch_of(module, client=client))
    assert stream.captures == 3


def test_nobody_elses_random_numbers_move() -> None:
    module = network(0.5)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    replayed_of(module, ADAMW, jitter=0.1).train(dispatch_of(module))
    assert torch.equal(torch.rand(4), expected)


def test_shapes_above_the_limit_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MOST_GRAPHS", 1)
    module, stream, said = network(), CountingLane(), []
    ours = replayed_of(module, ADAMW, stream=stream, say=said.append)
    for client in (1, 4):
        dispatch = dispatch_of(module, client=client)
        same(ours.train(dispatch), trainer_of(module, ADAMW).train(dispatch))
    assert stream.captures == 1
    assert said == ["training is captured for 1 batch shapes; steps on any further shape run eagerly"]


class BrokenLane(ImmediateStream):
    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        super().capture(work)
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand twenty lines more")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_what_cannot_be_captured_is_eager_and_says_so_once() -> None:
    module, said = network(0.3), []
    ours = replayed_of(module, ADAMW, stream=BrokenLane(), say=said.append)
    for seed in (5, 6):
        dispatch = dispatch_of(module, seed=seed)
        same(ours.train(dispatch), trainer_of(module, ADAMW).train(dispatch))
    assert said == [
        "training runs eagerly: a step of Blobs cannot be captured "
        "(CUDA error: operation not permitted when stream is capturing)"
    ]


class Numpy(Blobs):
    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Any:
        inputs, labels = super().batch(client, rows, generator)
        return inputs, labels.numpy()

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        return super().loss(module, (batch[0], torch.from_numpy(batch[1])))


def test_batches_of_other_things_than_tensors_are_eager() -> None:
    module, task, said = network(), Numpy(), []
    bound = Layout.of(module).bind(deepcopy(module))
    ours = Trainer(task, SGD, bound, ReplayedSteps(task, SGD, bound, say=said.append))
    same(ours.train(dispatch_of(module)), trainer_of(module, SGD).train(dispatch_of(module)))
    assert said == ["training runs eagerly: a step of Numpy cannot be captured (its batches contain a ndarray)"]


def test_a_users_mistake_is_an_error_as_before() -> None:
    trainer = replayed_of(nn.Linear(5, 4), SGD)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.train(dispatch_of(nn.Linear(5, 4)))


class LowPrecision(Blobs):
    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(module, batch)


def test_no_weights_in_low_precision_outlive_a_step() -> None:
    """Inside an autocast of the caller's, whose cache would keep the weights of the first step."""
    module, task = network(), LowPrecision()
    bound = Layout.of(module).bind(deepcopy(module))
    dispatch = dispatch_of(module)
    plain = Trainer(task, SGD, bound).train(dispatch)
    with torch.autocast("cpu", torch.bfloat16):
        ours = Trainer(task, SGD, bound, ReplayedSteps(task, SGD, bound)).train(dispatch)
    torch.testing.assert_close(ours.delta, plain.delta, rtol=1e-5, atol=1e-6)


def test_the_bias_correction_on_the_device_is_that_of_the_host() -> None:
    count = torch.zeros((), dtype=torch.float64)
    for step in range(1, 50):
        count.add_(1)
        for there, here in zip(bias_correction(ADAMW, count), bias_correction(ADAMW, float(step)), strict=True):
            assert float(there) == pytest.approx(here, rel=1e-12)


def test_the_step_with_numbers_on_the_device_is_the_plain_one() -> None:
    rng = torch.Generator().manual_seed(0)
    params, grads, start, shift, first = (torch.randn(100, generator=rng) for _ in range(5))
    second, local = torch.rand(100, generator=rng), replace(ADAMW, proximal=0.5)
    bias = bias_correction(local, torch.tensor(3.0, dtype=torch.float64))
    ours = [tensor.clone() for tensor in (params, grads, start, shift, first, second)]
    raw, low = torch.ones(100), torch.zeros(100, dtype=torch.bfloat16)
    compiled_update(local, Precision(compiled=False))(ours[0], low, ours[1], raw, *ours[2:], *(each.float() for each in bias))
    assert torch.equal(ours[1], grads)
    assert torch.equal(raw, 1 + grads)
    adamw_step(local, params, grads, start, shift, first, second, *bias_correction(local, 3.0))
    for mine, plain in zip((ours[0], *ours[4:]), (params, first, second), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)
    assert torch.equal(low, ours[0].bfloat16())


@dataclass(frozen=True)
class Two:
    ids: Tensor
    extra: tuple[Tensor | None, int]


def test_batches_are_trees_of_tensors() -> None:
    ones = torch.ones(2, 3)
    batch = {"a": [ones, Two(ones.int(), (None, 4))], "b": (ones[0],)}
    assert [tuple(tensor.shape) for tensor in tensors_of(batch)] == [(2, 3), (2, 3), (3,)]
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert doubled["a"][1].extra == (None, 4)
    assert doubled["a"][1].ids.sum() == 12
    assert shape_of(batch) == shape_of(doubled)
    others = [
        {"a": batch["a"]},
        {"a": [ones, Two(ones, (None, 4))], "b": batch["b"]},
        {"a": [ones, Two(ones.int(), (None, 5))], "b": batch["b"]},
        {"a": [ones, Two(ones.int(), (ones, 4))], "b": batch["b"]},
        {"a": batch["a"], "b": (ones[:, 0],)},
    ]
    assert len({shape_of(each) for each in [batch, *others]}) == 6


def test_what_a_model_makes_anywhere_is_made_on_the_device() -> None:
    mine = torch.Generator()
    with FactoriesOnDevice(torch.device("meta")):
        assert torch.arange(3).is_meta
        assert torch.zeros(2, device=None).is_meta
        assert torch.rand([]).is_meta
        assert torch.ones(2, device="cpu").device.type == "cpu"
        assert torch.rand(2, generator=mine).device.type == "cpu"
        assert torch.tensor(2.0).device.type == "cpu", "a number on the CPU needs no copy"
    with FactoriesOnDevice(torch.device("cpu")):
        for number in (2, 2.5, True):
            made = torch.tensor(number, device="cpu")
            assert (made.item(), made.dtype, made.shape) == (number, torch.tensor(number).dtype, ())

"""Each captured piece beside the plain one, over few steps from a state that is far from zero."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_cifar import DEVICES, EXACT, experiment
from torch import Tensor, nn

from fedecho import Experiment
from fedecho.core.layout import Layout
from fedecho.core.randomness import derive
from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.distill.distiller import Adam, Distiller
from fedecho.distill.student import Student
from fedecho.executors.executor import Job
from fedecho.gpu.distillation import compiled_distillation_step
from fedecho.learning.trainer import Trainer
from fedecho.runs.on_gpu import GpuParts, gpu_settings
from fedecho.tasks.classification import seeded
from fedecho.tasks.vision.cifar import CifarTask


def near(ours: Tensor, plain: Tensor, tolerance: float) -> None:
    assert float((ours.cpu() - plain).norm() / plain.norm()) < tolerance


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_update_is_the_distillers(optimizer: Any) -> None:
    distiller, rng = Distiller(optimizer=optimizer, distill_lr=1e-2, beta1=0.8, beta2=0.95), torch.Generator().manual_seed(0)
    start, first = torch.randn(50, generator=rng), torch.randn(50, generator=rng)
    second = torch.rand(50, generator=rng)
    plain, ours = start.clone(), start.clone()
    adam, mine = Adam(first.clone(), second.clone(), 3), Adam(first.clone(), second.clone(), 3)
    update = compiled_distillation_step(distiller, EXACT)
    for step in range(4, 7):
        grad = torch.randn(50, generator=rng)
        adam = distiller.step(adam, plain, grad * 0.5)
        update(ours, ours, grad, torch.tensor(0.5), mine.first, mine.second, torch.tensor(float(step)))
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(mine.second, adam.second)


def plain_parts(one: Experiment) -> GpuParts:
    """On the CPU: its float32 is the reference on every device."""
    return GpuParts(one, EXACT, torch.device("cpu"))


@pytest.mark.parametrize("correction", ["step", "once"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_job_with_control_variates(data: Path, device: str, correction: str) -> None:
    one = experiment(data, "fedac", "local.num_local_steps=2", f"algorithm.correction={correction}")
    on_cpu, rng = plain_parts(one), torch.Generator().manual_seed(0)
    weights = on_cpu.network.layout.pack(on_cpu.network.module)
    correction, control = (torch.randn(len(weights.params), generator=rng) for _ in range(2))
    dispatch = Dispatch(0, 4, GlobalModel(2, weights, correction), 11)
    plain = Trainer(on_cpu.task, one.local_training, on_cpu.network).train(dispatch, control)
    with gpu_settings(EXACT, torch.device(device)):
        parts = GpuParts(one, EXACT, torch.device(device))
        there = Weights(weights.params.to(device), weights.buffers.to(device))
        model = GlobalModel(2, there, correction.to(device))
        executor = parts.executor(1, None)
        executor.submit(Job(replace(dispatch, model=model), control.to(device)), 1.0)
        ours = executor.result(0)
        executor.close()
    assert (ours.client, ours.base_version, ours.num_steps) == (4, 2, 2)
    near(ours.delta, plain.delta, 1e-3)
    near(ours.buffers, plain.buffers, 1e-4)
    assert ours.correction is not None
    assert plain.correction is not None
    near(ours.correction, plain.correction, 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_teaching_from_moments_that_have_seen_steps(data: Path, device: str) -> None:
    one = experiment(data, "fedecho")
    distiller = Distiller(batch_size=10, distill_lr=1e-3, clip_norm=0.5, beta1=0.5, beta2=0.9)
    on_cpu, rng = plain_parts(one), torch.Generator().manual_seed(0)
    weights = on_cpu.network.layout.pack(on_cpu.network.module)
    teacher, first = torch.randn(20, 10, generator=rng), 0.01 * torch.randn(len(weights.params), generator=rng)

    def taught(student: Student, where: str) -> tuple[Adam, Weights, Tensor]:
        adam = Adam(first.to(where, copy=True), (first.square() + 1e-4).to(where), 2)
        start = Weights(weights.params.to(where), weights.buffers.to(where))
        batches = [torch.arange(10, device=where), torch.arange(10, 20, device=where)]
        return student.teach(distiller, adam, start, teacher.to(where), batches)

    plain = taught(Student(on_cpu.network, on_cpu.task.logits, 20), "cpu")
    with gpu_settings(EXACT, torch.device(device)):
        ours = taught(GpuParts(one, EXACT, torch.device(device)).student(), device)
    assert ours[0].num_steps == plain[0].num_steps == 4
    near(ours[1].params.cpu() - weights.params, plain[1].params - weights.params, 1e-3)
    near(ours[0].first, plain[0].first, 1e-3)
    near(ours[0].second, plain[0].second, 1e-3)
    near(ours[1].buffers, plain[1].buffers, 1e-4)
    near(ours[2], plain[2], 1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_predictions_on_some_rows_are_those_on_all(data: Path, device: str) -> None:
    """Of one number of rows and of another, for one model and for another."""
    one = experiment(data, "fedecho")
    plain = plain_parts(one).student()
    weights = plain.network.layout.pack(plain.network.module)
    with gpu_settings(EXACT, torch.device(device)):
        student = GpuParts(one, EXACT, torch.device(device)).student()
        for scale, rows in ((1.0, [0, 3, 19]), (1.5, [7, 2, 11]), (1.0, [5, 5])):
            scaled = Weights(weights.params * scale, weights.buffers)
            there = Weights(scaled.params.to(device), scaled.buffers.to(device))
            near(student.predict(there, torch.tensor(rows, device=device)), plain.infer(scaled)[rows], 1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_in_graphs_of_two_sizes_is_the_modules(data: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedecho.tasks.vision.cifar.EVAL_CHUNK", 25)  # of 60 test images: 25, 25 and 10
    with gpu_settings(EXACT, torch.device(device)):
        parts = GpuParts(experiment(data, "fedbuff"), EXACT, torch.device(device))
        for scale in (1.0, 1.5):
            weights = parts.network.layout.pack(parts.network.module)
            weights.params.mul_(scale)
            ours = parts.evaluate(weights)
            parts.network.load(weights)
            plain = parts.task.evaluate(parts.network.module.eval())
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)


class Scaled(nn.Module):
    """Of two scales it says the same of itself: ``repr`` shows the layers, not the code and the numbers around them."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 10)
        self.register_buffer("mask", torch.rand(4) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean(dim=(2, 3)) * self.mask
        return self.scale * self.head(x)


@dataclass(frozen=True, kw_only=True)
class ScaledCifar(CifarTask):
    scale: float = 1.0

    def network(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: Scaled(self.scale))


def test_two_networks_that_look_alike_are_captured_apart(data: Path) -> None:
    """Trained and judged in one process, each as the plain program has it: scale and mask are not in the weights."""
    for scale, seed in ((1.0, 0), (100.0, 0), (100.0, 3)):
        one = replace(experiment(data, "fedbuff"), seed=seed)
        task = ScaledCifar(scale=scale, data_dir=str(data), num_clients=30, seed=seed)
        one = replace(one, task=task)
        parts = plain_parts(one)
        assert parts.one_by_one == ""
        weights = parts.network.layout.pack(parts.network.module)
        executor = parts.executor(1, None)
        dispatch = Dispatch(0, 4, GlobalModel(0, weights), 11)
        executor.submit(Job(dispatch, None), 1.0)
        ours = executor.result(0)
        executor.close()
        module = task.network(derive(seed, "network"))
        plain = Trainer(parts.task, one.local_training, Layout.of(module).bind(module)).train(dispatch)
        near(ours.delta, plain.delta, 1e-4)
        assert parts.evaluate(weights)["loss"] == pytest.approx(task.evaluate(module.eval())["loss"], rel=1e-4)


class Quickstart(nn.Module):
    """The network of Flower's PyTorch quickstart, which flattens with ``view``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x.contiguous())))
        x = self.pool(torch.relu(self.conv2(x))).view(-1, 16 * 5 * 5)
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


@dataclass(frozen=True, kw_only=True)
class QuickstartCifar(CifarTask):
    def network(self, seed: int) -> nn.Module:
        return seeded(seed, Quickstart)


def test_a_network_that_cannot_take_channels_last_trains_in_single_steps(data: Path) -> None:
    one = experiment(data, "fedbuff")
    parts = plain_parts(replace(one, task=QuickstartCifar(data_dir=str(data), num_clients=30)))
    assert "the network calls view on a convolution's output" in parts.one_by_one
    weights = parts.network.layout.pack(parts.network.module)
    dispatch = Dispatch(0, 4, GlobalModel(0, weights), 11)
    executor = parts.executor(1, None)
    executor.submit(Job(dispatch, None), 1.0)
    ours = executor.result(0)
    executor.close()
    module = parts.task.network(derive(one.seed, "network"))
    plain = Trainer(parts.task, one.local_training, Layout.of(module).bind(module)).train(dispatch)
    near(ours.delta, plain.delta, 1e-4)
    assert parts.evaluate(weights)["loss"] == pytest.approx(parts.task.evaluate(module.eval())["loss"], rel=1e-4)


@dataclass(frozen=True, kw_only=True)
class Repeating(CifarTask):
    """Layers of torch alone, the same ones, of which one may be used ``again``."""

    again: bool = False

    def network(self, seed: int) -> nn.Module:
        def made() -> nn.Module:
            act = nn.Tanh()
            layers = [nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), act, nn.Flatten(), nn.Linear(4 * 8 * 8, 10)]
            return nn.Sequential(*layers, *([act] if self.again else []))

        return seeded(seed, made)


def test_a_network_that_uses_a_layer_again_is_not_taken_for_another(data: Path) -> None:
    for again in (False, True):
        one = experiment(data, "fedbuff")
        task = Repeating(again=again, data_dir=str(data), num_clients=30)
        parts = plain_parts(replace(one, task=task))
        assert parts.one_by_one == ""
        module = task.network(derive(one.seed, "network"))
        ours = parts.evaluate(parts.network.layout.pack(parts.network.module))
        assert ours["loss"] == pytest.approx(parts.task.evaluate(module.eval())["loss"], rel=1e-4)


class Forgetful(CifarTask):
    """Its evaluation does not switch gradients off by itself."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        logits = module(self.unlabeled_images(torch.arange(2, device=self.device)))
        return {"accuracy": 1.0, "graphs": float(logits.requires_grad), "grad_mode": float(torch.is_grad_enabled())}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_needs_no_gradients(data: Path, device: str, optimizer: str) -> None:
    """Captured (sgd) or eager."""
    one = experiment(data, "fedbuff", f"local.optimizer={optimizer}")
    forgetful = replace(one, task=Forgetful(**{each.name: getattr(one.task, each.name) for each in fields(CifarTask)}))
    with gpu_settings(EXACT, torch.device(device)):
        parts = GpuParts(forgetful, EXACT, torch.device(device))
        scores = parts.evaluate(parts.network.layout.pack(parts.network.module))
    assert bool(parts.one_by_one) == (optimizer == "adamw")
    assert scores == {"accuracy": 1.0, "graphs": 0.0, "grad_mode": 0.0}


def test_the_settings_of_a_run_on_a_gpu_are_put_back() -> None:
    def seen() -> tuple[object, ...]:
        cudnn, matmul, dynamo = torch.backends.cudnn, torch.backends.cuda.matmul, torch._dynamo.config
        limit = dynamo.recompile_limit if hasattr(dynamo, "recompile_limit") else dynamo.cache_size_limit
        flags = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32)
        return limit, torch.are_deterministic_algorithms_enabled(), *flags

    before = seen()
    with gpu_settings(EXACT, torch.device("cpu")):
        assert seen() != before
    assert seen() == before

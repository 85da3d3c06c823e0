"""Text tasks in replayed steps: as GpuParts puts them together, on the CPU and on a GPU where there is one."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_cifar import DEVICES, EXACT, ON_GPU
from tiny_text import save_classifier, write_world
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fedecho import Experiment, load
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.executors.executor import Job
from fedecho.gpu.capture import Precision, compiled_update
from fedecho.gpu.replay import ReplayedSteps
from fedecho.learning.descent import bias_correction
from fedecho.learning.trainer import Trainer
from fedecho.runs import on_gpu as gpu
from fedecho.runs.on_gpu import GpuParts, gpu_settings

KINDS = {
    "mrpc": ["task.model=tiny-bert", "task.unlabeled_size=4"],
    "lora": ["task.model=tiny-llama", "task.train=gsm8k-train", "task.num_unlabeled=4", "task.lora_rank=2"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_world(tmp_path_factory.mktemp("world"))
    save_classifier(folder / "plain-bert", dropout=0.0)
    return folder


def experiment(world: Path, kind: str, *settings: str, algorithm: str = "fedbuff") -> Experiment:
    small = ["task.num_clients=3", f"task.data_dir={world}", "local.client_lr=1e-3", "local.batch_size=4", "concurrency=3"]
    recipe = "mrpc" if kind == "mrpc" else "mathinstruct"
    return load(recipe, algorithm=algorithm, settings=[*KINDS[kind], *small, *settings])


def on(weights: Weights, device: str) -> Weights:
    return Weights(weights.params.to(device), weights.buffers.to(device))


def variates(one: Experiment, start: Weights, device: str) -> tuple[Tensor | None, list[Tensor | None]]:
    """c and every client's c_i, where the method has them; the first client has never trained."""
    if not one.local_training.control_variates:
        return None, [None] * 3
    rng = torch.Generator().manual_seed(0)
    c, *others = (0.01 * torch.randn(len(start.params), generator=rng) for _ in range(3))
    return c.to(device), [None, *(each.to(device) for each in others)]


def jobs(
    one: Experiment, precision: Precision, device: str, start: Weights, said: list[str] | None = None
) -> list[ClientUpdate]:
    """Three clients one after the other, on an executor of their own."""
    said = [] if said is None else said
    with gpu_settings(precision, torch.device(device)):
        parts = GpuParts(one, precision, torch.device(device), said.append)
        c, mine = variates(one, start, device)
        executor, model = parts.executor(1, None), GlobalModel(0, on(start, device), c)
        for number in range(3):
            executor.submit(Job(Dispatch(number, number, model, 40 + number), mine[number]), 0.0)
        return [executor.result(number) for number in range(3)]


def start_of(one: Experiment) -> Weights:
    network = GpuParts(one, EXACT, torch.device("cpu")).network
    return network.weights.clone()


def near(ours: Tensor, plain: Tensor, tolerance: float) -> None:
    assert float((ours.cpu() - plain).norm() / plain.norm()) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("algorithm", ["fedbuff", "fedac"])
def test_replayed_training_is_the_plain_training(world: Path, kind: str, algorithm: str, device: str) -> None:
    """Without dropout, whose draws follow the shapes. The plain trainer pads no further than it must, on the CPU."""
    model = ["task.model=plain-bert"] if kind == "mrpc" else []
    one = experiment(world, kind, *model, "local.weight_decay=0.5", "local.eps=1e-4", algorithm=algorithm)
    start, said = start_of(one), list[str]()
    updates = jobs(one, EXACT, device, start, said)
    task = one.task
    parts = GpuParts(one, EXACT, torch.device("cpu"))
    trainer = Trainer(task, one.local_training, parts.network)
    c, mine = variates(one, start, "cpu")
    for number, ours in enumerate(updates):
        plain = trainer.train(Dispatch(number, number, GlobalModel(0, start, c), 40 + number), mine[number])
        assert ours.num_steps == plain.num_steps
        near(ours.delta, plain.delta, 2e-3)
        assert ours.metrics["train_loss"] == pytest.approx(plain.metrics["train_loss"], rel=1e-4)
        assert (ours.correction is None) is (algorithm != "fedac")
        if ours.correction is not None and plain.correction is not None:
            near(ours.correction, plain.correction, 2e-3)
    assert said == [], "it was captured"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "size"), [("mrpc", 4), ("lora", 4), ("lora", 16)])
def test_the_same_bytes_twice_and_in_another_order(world: Path, kind: str, size: int, device: str) -> None:
    """With dropout where the model has it. The second time the middle job is alone, so its shapes are new to it.

    Sixteen texts share rows that are wide enough for attention's fused kernels to split them up.
    """
    one = experiment(world, kind, f"local.batch_size={size}")
    if size > 4:
        mine = one.task.in_few_shapes().batch(0, torch.arange(one.task.num_examples(0)), torch.Generator())
        assert mine.text is not None
        assert mine.ids.shape[1] >= 128
    start = start_of(one)
    first, again = jobs(one, EXACT, device, start), jobs(one, EXACT, device, start)
    for ours, other in zip(first, again, strict=True):
        assert torch.equal(ours.delta, other.delta)
        assert ours.metrics == other.metrics
    with gpu_settings(EXACT, torch.device(device)):
        executor = GpuParts(one, EXACT, torch.device(device)).executor(1, None)
        executor.submit(Job(Dispatch(1, 1, GlobalModel(0, on(start, device)), 41)), 0.0)
        alone = executor.result(1)
    assert torch.equal(alone.delta, first[1].delta)
    assert not torch.equal(first[0].delta[:100], first[1].delta[:100])


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.parametrize("precision", [EXACT, Precision(torch.float32)])
def test_dropout_draws_anew_in_every_replay(world: Path, precision: Precision) -> None:
    """One batch of all examples, so that the seed changes nothing but the draws of dropout (and the order of a sum)."""
    one = experiment(world, "mrpc", "local.num_local_steps=1", "local.batch_size=100", "local.optimizer=sgd")
    start, delta = start_of(one), []
    with gpu_settings(precision, torch.device("cuda")):
        executor = GpuParts(one, precision, torch.device("cuda")).executor(1, None)
        for number, seed in enumerate((3, 4, 3)):
            executor.submit(Job(Dispatch(number, 0, GlobalModel(0, on(start, "cuda")), seed)), 0.0)
            delta.append(executor.result(number).delta)
    torch.testing.assert_close(delta[0], delta[2], **({"rtol": 0, "atol": 0} if precision is EXACT else {}))
    assert float((delta[0] - delta[1]).norm() / delta[0].norm()) > 1e-2


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(KINDS))
def test_compiled_and_in_low_precision(world: Path, kind: str, dtype: torch.dtype, deterministic: bool) -> None:
    """Where the same bytes need not come out twice the model's layers are compiled too."""
    one = experiment(world, kind, *(["task.model=plain-bert"] if kind == "mrpc" else []), "local.eps=1e-4")
    start, said = start_of(one), list[str]()
    wanted = jobs(one, EXACT, "cpu", start)
    ours = jobs(one, Precision(dtype, deterministic), "cuda", start, said)
    assert said == []
    for mine, plain in zip(ours, wanted, strict=True):
        assert float(cosine_similarity(mine.delta.cpu(), plain.delta, dim=0)) > (0.9999 if dtype == torch.float32 else 0.9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("algorithm", ["fedbuff", "fedac"])
def test_weights_kept_in_low_precision_have_the_bits_of_autocast(
    world: Path, kind: str, algorithm: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, whose draws are the same. Of an adapter's two matrices one is left to autocast: peft asks for its type."""
    one = experiment(world, kind, algorithm=algorithm)
    low = Precision(torch.bfloat16, deterministic=True, compiled=device == "cuda")
    start, real, found = start_of(one), ReplayedSteps._cast_once, list[float]()

    def noted(steps: ReplayedSteps, batch: Any) -> Any:
        names = real(steps, batch)
        found.append(len(names) / len(steps._linear_params))
        return names

    monkeypatch.setattr(ReplayedSteps, "_cast_once", noted)
    ours = jobs(one, low, device, start)
    monkeypatch.setattr(ReplayedSteps, "_cast_once", lambda steps, batch: [])
    for mine, plain in zip(ours, jobs(one, low, device, start), strict=True):
        assert torch.equal(mine.delta, plain.delta)
        assert mine.correction is None or torch.equal(mine.correction, plain.correction)  # type: ignore[arg-type]
    assert found
    assert set(found) == {1.0 if kind == "mrpc" else 0.5}


@pytest.mark.gpu
@ON_GPU[1]
def test_the_compiled_step_is_the_plain_one() -> None:
    local = replace(load("mrpc").local, proximal=0.5, weight_decay=0.1, eps=1e-3)
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1000, generator=rng) for _ in range(5)] + [torch.rand(1000, generator=rng)]
    bias = [each.float() for each in bias_correction(local, torch.tensor(3.0, dtype=torch.float64))]
    there = [tensor.cuda() for tensor in tensors]
    low = [torch.zeros(1000, dtype=torch.bfloat16, device=device) for device in ("cuda", "cpu")]
    raw = [torch.zeros(1000, device=device) for device in ("cuda", "cpu")]
    compiled_update(local, Precision())(there[0], low[0], there[1], raw[0], *there[2:], *(each.cuda() for each in bias))
    compiled_update(local, Precision(compiled=False))(tensors[0], low[1], tensors[1], raw[1], *tensors[2:], *bias)
    for ours, plain in zip((there[0], *there[4:], raw[0]), (tensors[0], *tensors[4:], raw[1]), strict=True):
        torch.testing.assert_close(ours.cpu(), plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(low[0], there[0].bfloat16())


class Asks:
    """A task whose loss looks at a value on the device, which no capture can hold; with dropout, which must still draw."""

    num_clients, num_unlabeled = 1, 0

    def num_examples(self, client: int) -> int:
        return 6

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(len(rows), 3, generator=generator).cuda()

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        out = module(batch).square()
        return out.mean() if float(out.detach().sum()) >= 0 else out.sum()


@pytest.mark.gpu
@ON_GPU[1]
def test_a_capture_that_fails_leaves_a_gpu_that_works() -> None:
    from fedecho.core.layout import Layout
    from fedecho.learning import LocalTraining

    local, said, device = LocalTraining(batch_size=4, epochs=2, optimizer="adamw"), list[str](), torch.device("cuda", 0)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    bound, task = Layout.of(module).bind(module, device), Asks()
    steps = ReplayedSteps(task, local, bound, say=said.append)  # type: ignore[arg-type]
    dispatch = Dispatch(0, 0, GlobalModel(0, bound.weights.clone()), 5)
    ours: Any = [Trainer(task, local, bound, steps).train(dispatch) for _ in range(2)]  # type: ignore[arg-type]
    plain = Trainer(task, local, bound).train(dispatch)  # type: ignore[arg-type]
    assert len(said) == 1
    assert "training runs eagerly" in said[0]
    assert torch.equal(ours[0].delta, ours[1].delta)
    torch.testing.assert_close(ours[0].delta, plain.delta, rtol=1e-4, atol=1e-6)


def test_who_asks_for_fp32_is_not_advised_to_round_it() -> None:
    """Warnings are errors here, as elsewhere in the tests; the text is that of torch's compiler."""
    advice = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider"
    with gpu_settings(EXACT, torch.device("cpu")):
        warnings.warn(advice, stacklevel=1)
        with pytest.raises(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)


def test_under_mps_few_connections_and_one_line_when_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: _raise("CUDA-capable device(s) is/are busy or unavailable\nmore"))
    for pipe, listens, given, wanted in (
        ("", False, None, "32"),
        ("/pipe", False, None, "4"),
        ("", True, None, "4"),  # a daemon at its usual place, where CUDA finds it without a word
        ("/pipe", False, "8", "8"),
        ("", True, "2", "2"),
    ):
        monkeypatch.setattr(gpu, "MPS_CONTROL", str(tmp_path if listens else tmp_path / "none"))
        monkeypatch.setenv(gpu.MPS, pipe)
        monkeypatch.delenv(gpu.CONNECTIONS, raising=False)
        if given is not None:
            monkeypatch.setenv(gpu.CONNECTIONS, given)
        with pytest.raises(ValueError, match=rf"accepts no further process: .* MPS .* now {wanted},") as found:
            gpu.select_gpu()
        assert "\n" not in str(found.value)
        assert gpu.os.environ[gpu.CONNECTIONS] == wanted
    monkeypatch.setattr(torch.cuda, "current_device", lambda: _raise("CUDA error: no kernel image\nmore"))
    with pytest.raises(ValueError, match=r"^the GPU cannot be used: CUDA error: no kernel image$"):
        gpu.select_gpu()


def _raise(text: str) -> int:
    raise RuntimeError(text)

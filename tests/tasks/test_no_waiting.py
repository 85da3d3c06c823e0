"""A text task's step never synchronizes with the device or copies to it. CUDA graphs forbid both; no GPU is needed to check.

The models are on the device "meta", which has shapes and no values: what asks for a value, or lets a tensor of the CPU meet one of
the device, cannot stay unseen.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import tokenizer, write_world
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MPNetConfig, MPNetForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from fedecho.gpu.replay import FactoriesOnDevice, map_tensors
from fedecho.tasks import MathInstructTask, MrpcTask
from fedecho.tasks.text.batches import Ragged

META = torch.device("meta")
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "item", "is_nonzero", "unique_dim", "_unique2"}


class NoLists(TorchFunctionMode):
    """Refuses tensors made from Python's numbers on the device, which are copied there from the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and made.device == META:
            raise AssertionError(f"{func} copies to the device")
        return made


class NoWaiting(TorchDispatchMode):
    """Refuses what a stream that is being captured refuses. Numbers (no dimensions) on the CPU go into kernels as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        made = None if name in WAITING else func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        copied = len({tensor.device for tensor in tensors}) > 1 and name in ("_to_copy", "copy_", "to")
        if name in WAITING or copied or any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors):
            raise AssertionError(f"{func} waits for the device, or copies to it")
        return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks into masks unless a stream is being captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def step_on_meta(task: Any, module: nn.Module) -> None:
    batch = map_tensors(task.in_few_shapes().batch(0, torch.arange(3), torch.Generator()), lambda tensor: tensor.to(META))
    module.train().to(META)
    with NoLists(), FactoriesOnDevice(META), NoWaiting():
        loss = task.loss(module, batch)
        loss.backward()
    trained = [param for param in module.parameters() if param.requires_grad]
    assert trained
    assert any(param.grad is not None for param in trained)


def test_a_classifier(world: Path) -> None:
    task = MrpcTask(model="tiny-bert", num_clients=2, unlabeled_size=4, data_dir=str(world))
    step_on_meta(task, task.network(0))


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_language_model(world: Path, lora_rank: int | None) -> None:
    task = MathInstructTask(
        model="tiny-llama", train="gsm8k-train", num_clients=2, num_unlabeled=4, data_dir=str(world), lora_rank=lora_rank
    )
    step_on_meta(task, task.network(0))


@pytest.mark.parametrize(
    ("config", "model"),
    [(MPNetConfig, MPNetForSequenceClassification), (RobertaConfig, RobertaForSequenceClassification)],
)
def test_classifiers_with_positions_of_their_own(world: Path, tmp_path: Path, config: Any, model: Any) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model(config(vocab_size=330, max_position_embeddings=90, pad_token_id=0, **small)).save_pretrained(tmp_path / "mine")
    tokenizer().save_pretrained(tmp_path / "mine")
    task = MrpcTask(model=str(tmp_path / "mine"), num_clients=2, unlabeled_size=4, data_dir=str(world))
    step_on_meta(task, task.network(0))


HERE, THERE = torch.ones(3), torch.ones(3, device=META)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: THERE.sum().item(),
        lambda: bool(THERE.all()),
        lambda: THERE[THERE > 0],
        lambda: HERE.to(META),
        lambda: THERE.clone().copy_(HERE),
        lambda: torch.tensor([1.0, 2.0], device=META),
        lambda: torch.as_tensor([1.0, 2.0], device=META),
        lambda: THERE.new_tensor([1.0, 2.0]),
        lambda: THERE.add(torch.arange(3)),
        lambda: Ragged.of([[1], [2, 3]], META).padded(torch.arange(2), 0),
    ],
)
def test_the_check_sees_what_a_capture_forbids(wrong: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NoLists(), NoWaiting():
        wrong()


def test_the_check_lets_pass_what_a_capture_can_hold() -> None:
    with NoLists(), FactoriesOnDevice(META), NoWaiting():
        (THERE * torch.tensor(2.0) + torch.arange(3) + torch.tensor(1, device=META)).sum()

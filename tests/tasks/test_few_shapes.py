"""Batches padded to few shapes, as the steps that are replayed want them: the same loss and the same gradients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import write_world
from torch import Tensor

from fedecho.data.spans import IGNORED
from fedecho.tasks import MathInstructTask, MrpcTask

ROWS = [torch.arange(3), torch.tensor([4, 0]), torch.arange(5)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def tasks(world: Path) -> dict[str, Any]:
    generative = MathInstructTask(
        model="tiny-llama", train="gsm8k-train", num_clients=2, num_unlabeled=4, data_dir=str(world), max_new_tokens=5
    )
    pairs = MrpcTask(model="tiny-bert", num_clients=2, unlabeled_size=4, data_dir=str(world))
    return {"mrpc": pairs, "mathinstruct": generative, "lora": replace(generative, lora_rank=2)}


def gradients(task: Any, module: torch.nn.Module, rows: Tensor) -> tuple[float, Tensor]:
    module.zero_grad()
    loss = task.loss(module.eval(), task.batch(0, rows, torch.Generator()))
    loss.backward()
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    return float(loss.detach()), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("kind", ["mrpc", "mathinstruct", "lora"])
def test_padding_changes_neither_loss_nor_gradients(world: Path, kind: str) -> None:
    plain = tasks(world)[kind]
    few, module = plain.in_few_shapes(), plain.network(3)
    with torch.no_grad():  # adapters begin at zero, and then half of them have no gradient
        for param in module.parameters():
            param.add_(0.05)
    for rows in ROWS:
        wanted, got = gradients(plain, module, rows), gradients(few, module, rows)
        assert got[0] == pytest.approx(wanted[0], rel=1e-5)
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-6)
        assert float(wanted[1].norm()) > 1e-3


def test_the_shapes_are_few_and_within_the_models_limit(world: Path) -> None:
    few = tasks(world)["mrpc"].in_few_shapes()
    widths = {few.batch(0, rows, torch.Generator())[0]["input_ids"].shape[1] for rows in torch.arange(20)[:, None]}
    plain = {
        tasks(world)["mrpc"].batch(0, torch.tensor([row]), torch.Generator())[0]["input_ids"].shape[1] for row in range(20)
    }
    assert all(width % 16 == 0 for width in widths)
    assert not any(few.batch(0, rows, torch.Generator())[0]["attention_mask"].all() for rows in torch.arange(20)[:, None])
    assert len(widths) < len(plain)
    tight = replace(few, max_length=20)
    inputs, _ = tight.batch(0, torch.arange(6), torch.Generator())
    assert {tensor.shape[1] for tensor in inputs.values()} == {20}


def test_places_are_filled_up_with_targets_that_do_not_count(world: Path) -> None:
    plain = tasks(world)["mathinstruct"]
    batch, few = (task.batch(0, torch.arange(3), torch.Generator()) for task in (plain, plain.in_few_shapes()))
    num = len(batch.row)
    assert few.ids.shape[1] % 64 == 0
    assert len(few.row) == len(few.column) == len(few.targets) == 512
    assert torch.equal(few.targets[:num], batch.targets)
    assert set(few.targets[num:].tolist()) == {IGNORED}
    assert torch.equal(few.ids[:, : batch.ids.shape[1]], batch.ids)
    assert int(few.mask.sum()) == int(batch.mask.sum())


@pytest.mark.parametrize("kind", ["mrpc", "mathinstruct"])
def test_all_but_training_is_as_it_was(world: Path, kind: str) -> None:
    plain = tasks(world)[kind]
    few, module = plain.in_few_shapes(), plain.network(3).eval()
    assert torch.equal(few.logits(module, torch.arange(4)), plain.logits(module, torch.arange(4)))
    assert few.evaluate(module) == plain.evaluate(module)
    if kind == "mathinstruct":
        assert torch.equal(few.hidden(module, torch.arange(4)), plain.hidden(module, torch.arange(4)))
    assert few == plain, "padding is no part of what a run is"

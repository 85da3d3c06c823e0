"""Batches of few shapes, padded or with several texts in a row: the same loss and the same gradients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import tokenizer, write_world
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.tasks import MathInstructTask, MrpcTask
from fedecho.tasks.text import pretrained
from fedecho.tasks.text.batches import IGNORED, own_text_only
from fedecho.tasks.text.pretrained import supports_packing

transformers = pytest.importorskip("transformers")

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


@pytest.mark.parametrize(
    ("kind", "packing"), [("mrpc", False), *((k, p) for k in ("mathinstruct", "lora") for p in (True, False))]
)
def test_few_shapes_change_neither_loss_nor_gradients(
    world: Path, kind: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tasks(world)[kind]
    if not packing:
        monkeypatch.setattr(pretrained, "PACKING", ())
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


def test_places_are_filled_up_with_targets_that_do_not_count(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "PACKING", ())
    plain = tasks(world)["mathinstruct"]
    batch, few = (task.batch(0, torch.arange(3), torch.Generator()) for task in (plain, plain.in_few_shapes()))
    num = len(batch.row)
    assert few.ids.shape[1] % 64 == 0
    assert len(few.row) == len(few.column) == len(few.targets) == 512
    assert torch.equal(few.targets[:num], batch.targets)
    assert set(few.targets[num:].tolist()) == {IGNORED}
    assert torch.equal(few.ids[:, : batch.ids.shape[1]], batch.ids)
    assert int(few.mask.sum()) == int(batch.mask.sum())


def test_texts_share_rows(world: Path) -> None:
    plain = tasks(world)["mathinstruct"]
    padded, few = (task.batch(0, torch.arange(12), torch.Generator()) for task in (plain, plain.in_few_shapes()))
    assert few.ids.shape[1] == 256, "as wide as the model takes"
    assert few.ids.shape[0] in (2, 4, 6)
    assert few.ids.numel() < padded.ids.numel() + 2 * 256, "no more than the rounding of rows beside what padding would take"
    num = len(padded.row)
    assert torch.equal(few.targets[:num], padded.targets)
    assert set(few.targets[num:].tolist()) == {IGNORED}
    assert few.text is not None
    assert few.position is not None
    for number, (ids, mask) in enumerate(zip(padded.ids, padded.mask, strict=True), start=1):
        mine = few.text == number
        assert torch.equal(few.ids[mine], ids[mask.bool()])
        assert few.position[mine].tolist() == list(range(int(mask.sum())))
    assert set(few.ids[few.text == 0].tolist()) == {tokenizer().pad_token_id}


SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"intermediate_size": 32, "head_dim": 8, "max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_that_pack_keep_the_texts_apart(kind: str, attention: str, tmp_path: Path) -> None:
    """Each text's hidden states in a shared row are those that it has alone, and so are the gradients."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, attn_implementation=attention)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    config.save_pretrained(tmp_path)
    assert supports_packing(tmp_path)
    texts = [torch.randint(1, 40, (num,)) for num in (7, 4, 9)]
    text = torch.tensor([[1] * 7 + [2] * 4 + [3] * 9 + [0] * 4])
    position = torch.tensor([[*range(7), *range(4), *range(9), 0, 0, 0, 0]])
    ids = torch.cat([*texts, torch.zeros(4, dtype=torch.long)])[None]
    seen = {"attention_mask": own_text_only(text, torch.float32), "position_ids": position}
    shared = model.base_model(ids, use_cache=False, **seen).last_hidden_state[0]
    alone = torch.cat([model.base_model(each[None], use_cache=False).last_hidden_state[0] for each in texts])
    torch.testing.assert_close(shared[:20], alone, rtol=1e-4, atol=1e-5)
    mixed = model.base_model(ids, use_cache=False).last_hidden_state[0, :20]
    assert float((mixed - alone).detach().norm()) > 0.1, "and it matters"
    for one, two in zip(_gradients(model, shared[:20], ids), _gradients(model, alone, ids), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)


def _gradients(model: nn.Module, hidden: Tensor, ids: Tensor) -> list[Tensor]:
    loss = cross_entropy(model.get_output_embeddings()(hidden), ids[0, :20])
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Mistral", {"sliding_window": 4}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("GPT2", {}),
    ],
)
def test_other_models_do_not_pack(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    getattr(transformers, f"{kind}Config")(**more).save_pretrained(tmp_path)
    assert not supports_packing(tmp_path)


@pytest.mark.parametrize("kind", ["mrpc", "mathinstruct"])
def test_all_but_training_is_as_it_was(world: Path, kind: str) -> None:
    plain = tasks(world)[kind]
    few, module = plain.in_few_shapes(), plain.network(3).eval()
    assert torch.equal(few.logits(module, torch.arange(4)), plain.logits(module, torch.arange(4)))
    assert few.evaluate(module) == plain.evaluate(module)
    if kind == "mathinstruct":
        assert torch.equal(few.hidden(module, torch.arange(4)), plain.hidden(module, torch.arange(4)))
    assert few == plain, "padding is no part of what a run is"

"""MRPC on a tiny classifier made on the spot."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_text import save_classifier, tokenizer, write_world
from torch.nn.functional import cross_entropy

from fedecho.data.partition import IidPartitioner
from fedecho.tasks import TASKS, MrpcTask
from fedecho.tasks.mrpc import f1_score


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def task(world: Path) -> MrpcTask:
    return MrpcTask(model="tiny-bert", num_clients=4, unlabeled_size=6, data_dir=str(world))


def test_every_pair_is_in_exactly_one_client(task: MrpcTask) -> None:
    rows = Counter(int(row) for client in range(4) for row in task._parts[client])
    assert set(rows.values()) == {1}
    assert sum(task.num_examples(client) for client in range(4)) == len(rows) == 60


def test_padding_takes_no_part_and_the_loss_is_that_of_single_pairs(task: MrpcTask) -> None:
    module, rows = task.network(0).eval(), torch.tensor([3, 0, 2])
    together = task.loss(module, task.batch(1, rows, torch.Generator()))
    made, single = tokenizer(), []
    for row in task._parts[1][rows].tolist():
        pair = task._train_pairs[row]
        inputs = made(pair.first, pair.second, return_tensors="pt")
        single.append(float(cross_entropy(module(**inputs).logits, torch.tensor([pair.label])).detach()))
    assert float(together.detach()) == pytest.approx(np.mean(single), rel=1e-5)
    apart = torch.cat([task.logits(module, torch.tensor([row])) for row in range(6)])
    assert torch.allclose(task.logits(module, torch.arange(6)), apart, atol=1e-6)


def test_the_unlabeled_set_is_some_or_all_of_the_test_pairs(task: MrpcTask) -> None:
    every = replace(task, unlabeled_size="all")
    assert (task.num_unlabeled, every.num_unlabeled) == (6, 16)
    texts = {(pair.first, pair.second) for pair in every._unlabeled_pairs}
    assert {(pair.first, pair.second) for pair in task._unlabeled_pairs} <= texts
    assert task.logits(task.network(0).eval(), torch.arange(6)).shape == (6, 2)
    with pytest.raises(ValueError, match=r"unlabeled_size is 17, but mrpc-test has 16"):
        replace(task, unlabeled_size=17).logits(task.network(0), torch.arange(1))


def test_accuracy_and_f1_against_counting(task: MrpcTask) -> None:
    module = task.network(3).eval()
    with torch.no_grad():
        module.classifier.weight.mul_(50)
    scores, right, pairs = task.evaluate(module), Counter(), 0
    for inputs, labels in task._dev:
        for guess, label in zip(module(**inputs).logits.argmax(dim=-1).tolist(), labels.tolist(), strict=True):
            right[guess, label] += 1
            pairs += 1
    assert pairs == 20
    assert scores["accuracy"] == pytest.approx((right[0, 0] + right[1, 1]) / 20)
    precision, recall = right[1, 1] / max(right[1, 0] + right[1, 1], 1), right[1, 1] / (right[0, 1] + right[1, 1])
    assert scores["f1"] == pytest.approx(2 * precision * recall / max(precision + recall, 1e-9))


def test_f1_of_more_classes_is_the_plain_mean() -> None:
    guesses, labels = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2, 2, 1])
    assert f1_score(guesses, labels, 3) == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    assert f1_score(torch.zeros(3), torch.zeros(3), 2) == 0.0


def test_the_head_is_drawn_from_the_seed_and_the_rest_is_the_files(task: MrpcTask) -> None:
    one, same, other = (dict(task.network(seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    different = {name for name in one if not torch.equal(one[name], other[name])}
    assert different == {"classifier.weight"}


def test_a_users_own_pairs(task: MrpcTask, tmp_path: Path) -> None:
    lines = [f'{{"sentence1": "cat {n}", "sentence2": "dog {n}", "label": {n % 3}}}' for n in range(12)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    mine = str(tmp_path / "mine.jsonl")
    own = replace(task, train=mine, dev=mine, unlabeled=mine, partition=IidPartitioner())
    assert own.logits(own.network(0).eval(), torch.arange(2)).shape == (2, 3)
    assert set(own.evaluate(own.network(0).eval())) == {"accuracy", "f1", "loss"}
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 3: class 2 is not in mrpc-train"):
        replace(task, dev=mine).evaluate(task.network(0).eval())


def test_texts_that_are_too_long(task: MrpcTask, world: Path, tmp_path: Path) -> None:
    save_classifier(tmp_path / "short", room=16)
    short = replace(task, model=str(tmp_path / "short"))
    with pytest.raises(ValueError, match=r"train\.tsv, line \d+: \d+ tokens are more than the 16 that the model takes"):
        short.batch(0, torch.arange(1), torch.Generator())
    cut = replace(short, max_length=12)
    assert cut.batch(0, torch.arange(4), torch.Generator())[0]["input_ids"].shape[1] <= 12
    with pytest.raises(ValueError, match=r"max_length must be at most the model's limit of 16 tokens, got 17"):
        replace(short, max_length=17).batch(0, torch.arange(1), torch.Generator())


def test_what_stands_beside_the_numbers(task: MrpcTask) -> None:
    assert task.notes["stand_in"] == "tiny-bert in place of bert-base-uncased"
    assert "stand_in" not in MrpcTask().notes
    assert "stand_in" not in MrpcTask(model="/weights/bert-base-uncased").notes
    assert task.provenance == "6 pairs of mrpc-test, labels not read"
    assert TASKS["mrpc"] is MrpcTask


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_clients": 0}, "num_clients must be at least 1, got 0"),
        ({"unlabeled_size": -1}, "unlabeled_size must be at least 0 or 'all', got -1"),
        ({"max_length": 3}, "max_length must be at least 8, got 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MrpcTask(**wrong)

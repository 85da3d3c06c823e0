"""MRPC on a tiny classifier."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_text import pairs, save_classifier, save_language_model, tokenizer, write_world
from tokenizers import normalizers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    BertConfig,
    BloomConfig,
    Data2VecTextConfig,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    IBertConfig,
    MambaConfig,
    MPNetConfig,
    PretrainedConfig,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaPreLayerNormConfig,
    T5Config,
    TrOCRConfig,
    XLMRobertaConfig,
    XLMRobertaXLConfig,
    XLNetConfig,
    XmodConfig,
)

from fedecho import load, simulate
from fedecho.tasks import TASKS, MrpcTask
from fedecho.tasks.partition import IidPartitioner
from fedecho.tasks.text.mrpc import f1_score, num_classes
from fedecho.tasks.text.pretrained import ENDLESS, max_input_tokens
from fedecho.tasks.text.readers import SentencePair
from fedecho.tasks.text.shared import between_sentences


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def task(world: Path) -> MrpcTask:
    return MrpcTask(model="tiny-bert", num_clients=4, unlabeled_size=6, data_dir=str(world))


TRAIN, DEV = pairs(60, 0), pairs(20, 1)
"""Label, first and second sentence, as ``write_mrpc`` writes them."""


def examples(task: MrpcTask, client: int) -> list[tuple[tuple[int, ...], int]]:
    """The tokens and the label of each of a client's examples."""
    inputs, labels = task.batch(client, torch.arange(task.num_examples(client)), torch.Generator())
    texts = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return list(zip([tuple(ids[mask].tolist()) for ids, mask in texts], labels.tolist(), strict=True))


def decided(task: MrpcTask) -> nn.Module:
    """A network whose logits tell texts apart; those of a new head hardly differ."""
    module = task.network(3).eval()
    with torch.no_grad():
        module.classifier.weight.mul_(1000)
    return module


def test_every_pair_is_in_exactly_one_client(task: MrpcTask) -> None:
    made = tokenizer(pair=True)
    there = Counter((tuple(made(first, second)["input_ids"]), label) for label, first, second in TRAIN)
    assert Counter(example for client in range(4) for example in examples(task, client)) == there


def test_who_has_what_and_what_u_is_move_with_the_seed(task: MrpcTask) -> None:
    other, module = replace(task, seed=1), decided(task)
    assert [examples(task, client) for client in range(4)] == [examples(replace(task), client) for client in range(4)]
    assert [examples(task, client) for client in range(4)] != [examples(other, client) for client in range(4)]
    logits = [each.logits(module, torch.arange(6)).sort(dim=0).values for each in (task, replace(task), other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-4), "another order alone would be the same set"


def test_sentences_do_not_run_together_where_a_tokenizer_puts_nothing_between_them(task: MrpcTask, tmp_path: Path) -> None:
    plain = replace(task, model=str(save_language_model(tmp_path / "plain")), num_clients=1, partition=IidPartitioner())
    read = {"".join(tokenizer().convert_ids_to_tokens(ids)).replace("Ġ", " ") for ids, _ in examples(plain, 0)}
    assert read == {f"{first}Ċ{second}" for _, first, second in TRAIN}, "a line break is between them"
    silent = tokenizer()
    silent.backend_tokenizer.normalizer = normalizers.Replace("\n", "")
    assert between_sentences(silent) == "</s>"
    silent.eos_token = None
    with pytest.raises(ValueError, match="puts nothing between two sentences and has no token to separate them"):
        between_sentences(silent)


def test_padding_takes_no_part_and_the_loss_is_that_of_single_pairs(task: MrpcTask) -> None:
    module, rows = task.network(0).eval(), torch.tensor([3, 0, 2])
    together = task.loss(module, task.batch(1, rows, torch.Generator()))
    made, single = tokenizer(pair=True), []
    inputs_of = {
        tuple(made(first, second)["input_ids"]): made(first, second, return_tensors="pt") for _, first, second in TRAIN
    }
    for row in rows.tolist():
        ids, label = examples(task, 1)[row]
        single.append(float(cross_entropy(module(**inputs_of[ids]).logits, torch.tensor([label])).detach()))
    assert float(together.detach()) == pytest.approx(np.mean(single), rel=1e-5)
    apart = torch.cat([task.logits(module, torch.tensor([row])) for row in range(6)])
    assert torch.allclose(task.logits(module, torch.arange(6)), apart, atol=1e-6)


def test_which_sentence_a_token_is_of_reaches_the_models_that_take_it(task: MrpcTask, tmp_path: Path) -> None:
    inputs = task.batch(0, torch.arange(3), torch.Generator())[0]
    assert int(inputs["token_type_ids"].max()) == 1
    folder = save_classifier(tmp_path / "untyped")
    tokenizer().save_pretrained(folder)
    untyped = replace(task, model=str(folder)).batch(0, torch.arange(3), torch.Generator())[0]
    assert "token_type_ids" not in untyped, "the tokenizer's types are not meant for the model"
    config = DistilBertConfig(vocab_size=330, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=80)
    DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "distil")
    tokenizer(pair=True).save_pretrained(tmp_path / "distil")
    distil = replace(task, model=str(tmp_path / "distil"))
    assert distil.logits(distil.network(0).eval(), torch.arange(2)).shape == (2, 2), "a model that takes no types gets none"
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    one_type = RobertaConfig(vocab_size=330, max_position_embeddings=80, type_vocab_size=1, **small)
    RobertaForSequenceClassification(one_type).save_pretrained(tmp_path / "one")
    tokenizer(pair=True).save_pretrained(tmp_path / "one")
    one = replace(task, model=str(tmp_path / "one"))
    assert one.logits(one.network(0).eval(), torch.arange(2)).shape == (2, 2), "a model of one type is told none"


def test_the_unlabeled_set_is_some_or_all_of_the_test_pairs(task: MrpcTask) -> None:
    every = replace(task, unlabeled_size="all")
    assert (task.num_unlabeled, every.num_unlabeled) == (6, 16)
    module = decided(task)
    some, all_of_them = task.logits(module, torch.arange(6)), every.logits(module, torch.arange(16))
    assert (some.shape, all_of_them.shape) == ((6, 2), (16, 2))
    assert all(torch.isclose(row, all_of_them, atol=1e-4).all(dim=1).any() for row in some)
    with pytest.raises(ValueError, match=r"unlabeled_size is 17, but mrpc-test has 16"):
        replace(task, unlabeled_size=17).logits(task.network(0), torch.arange(1))


def test_accuracy_and_f1_against_counting(task: MrpcTask) -> None:
    module = decided(task)
    scores, right, made = task.evaluate(module), Counter(), tokenizer(pair=True)
    for label, first, second in DEV:
        right[int(module(**made(first, second, return_tensors="pt")).logits.argmax()), label] += 1
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


@pytest.mark.parametrize(
    ("labels", "num", "line"),
    [([0, 0], 2, 0), ([1, 1], 2, 0), ([1, 0], 2, 0), ([2, 0, 1], 3, 0), ([1, 2, 2], 0, 2), ([0, 5, 9], 0, 2), ([0, 2], 0, 2)],
)
def test_labels_must_run_from_0_without_a_gap(labels: list[int], num: int, line: int) -> None:
    found = [SentencePair("a", "b", label, Path("mine.tsv"), row) for row, label in enumerate(labels, start=1)]
    if num:
        assert num_classes(found) == num
        return
    with pytest.raises(ValueError, match=rf"mine\.tsv, line {line}: label \d, but no pair has label \d"):
        num_classes(found)


def test_texts_that_are_too_long(task: MrpcTask, world: Path, tmp_path: Path) -> None:
    save_classifier(tmp_path / "short", room=16)
    short = replace(task, model=str(tmp_path / "short"))
    with pytest.raises(ValueError, match=r"train\.tsv, line \d+: \d+ tokens exceed the model's limit of 16"):
        short.batch(0, torch.arange(1), torch.Generator())
    cut = replace(short, max_length=12)
    assert cut.batch(0, torch.arange(4), torch.Generator())[0]["input_ids"].shape[1] <= 12
    with pytest.raises(ValueError, match=r"max_length must be at most the model's limit of 16 tokens, got 17"):
        replace(short, max_length=17).batch(0, torch.arange(1), torch.Generator())


OTHERS = [XLMRobertaXLConfig, RobertaPreLayerNormConfig, Data2VecTextConfig, IBertConfig, XmodConfig]


@pytest.mark.parametrize("kind", [RobertaConfig, MPNetConfig, XLMRobertaConfig, BertConfig, *OTHERS])
def test_models_whose_positions_begin_behind_the_padding_take_fewer_tokens(kind: type, tmp_path: Path) -> None:
    """The longest text that is let in goes through the model, and one token more does not."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = kind(vocab_size=330, max_position_embeddings=20, pad_token_id=1, **small)
    config.save_pretrained(tmp_path)
    model = AutoModel.from_config(config).eval()
    limit = max_input_tokens(tmp_path, tokenizer())
    assert limit == (20 if kind is BertConfig else 18)
    if kind is XmodConfig:
        model.set_default_language("en_XX")
    model(input_ids=torch.full((1, limit), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, limit + 1), 5))


@pytest.mark.parametrize("config", [T5Config(), BloomConfig(), MambaConfig(), XLNetConfig(d_model=16, n_head=2)], ids=str)
def test_models_that_set_no_limit_take_what_their_tokenizer_takes(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    made = tokenizer()
    assert max_input_tokens(tmp_path, made) == ENDLESS
    made.model_max_length = 77
    assert max_input_tokens(tmp_path, made) == 77


def test_a_model_that_has_no_outline_takes_what_its_configuration_says(tmp_path: Path) -> None:
    """As TrOCR, which has a head and no model without one."""
    TrOCRConfig(max_position_embeddings=40).save_pretrained(tmp_path)
    assert max_input_tokens(tmp_path, tokenizer()) == 40


def test_what_stands_beside_the_numbers(task: MrpcTask) -> None:
    assert task.notes["stand_in"] == "tiny-bert in place of bert-base-uncased"
    assert "stand_in" not in MrpcTask().notes
    assert "stand_in" not in MrpcTask(model="/weights/bert-base-uncased").notes
    own = MrpcTask(train="a.tsv", dev="b.tsv", unlabeled="c.tsv").notes["stand_in"]
    assert own == "a.tsv in place of mrpc-train; b.tsv in place of mrpc-dev; c.tsv in place of mrpc-test"
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


@pytest.mark.parametrize("distilled", [False, True])
def test_fedecho_whose_distillation_moves_nothing_is_fedbuff(
    distilled: bool, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student's dropout, the teachers' passes and the order of draws leave no trace in what clients learn."""
    monkeypatch.setenv("FEDECHO_DATA", str(world))
    small = ["task.model=tiny-bert", "task.unlabeled_size=8", "task.num_clients=6", "eval_every=3", "local.num_local_steps=2"]
    plain = simulate(load("mrpc", algorithm="fedbuff", versions=3, settings=small))
    rate = f"algorithm.distiller.distill_lr={1e-3 if distilled else 0.0}"
    echo = simulate(load("mrpc", algorithm="fedecho", versions=3, settings=[*small, rate]))
    assert (echo.summary.model_sha256 != plain.summary.model_sha256) == distilled
    if not distilled:
        assert echo.summary.arrivals_sha256 == plain.summary.arrivals_sha256

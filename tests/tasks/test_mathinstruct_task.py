"""MathInstruct on a tiny language model."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from functools import cache
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_text import TEMPLATE, save_language_model, tokenizer, write_world
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from fedecho.core.layout import Layout
from fedecho.tasks import MathInstructTask
from fedecho.tasks.partition import DirichletPartitioner
from fedecho.tasks.text.adapters import FusedRMSNorm
from fedecho.tasks.text.chat import Chat
from fedecho.tasks.text.gsm8k import final_number, greedy_answers, standard_error
from fedecho.tasks.text.pretrained import _in_float32, library, stop_tokens
from fedecho.tasks.text.readers import WorkedExample, read_instructions, split_unlabeled
from fedecho.tasks.text.shared import has_lower


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def task(world: Path) -> MathInstructTask:
    return MathInstructTask(
        model="tiny-llama", train="gsm8k-train", num_clients=3, num_unlabeled=5, max_new_tokens=6, data_dir=str(world)
    )


def in_file(task: MathInstructTask, name: str) -> list[WorkedExample]:
    return read_instructions(Path(str(task.data_dir)) / "gsm8k" / name)


@cache
def trained_chat() -> Chat:
    return Chat(tokenizer())


def encoded(example: WorkedExample) -> tuple[list[int], list[int]]:
    """The tokens of the question and of the answer."""
    chat = trained_chat()
    question, answer = chat.tokens(list(chat.question_and_answer(example.question, example.answer)))
    return question, answer


def examples_of(task: MathInstructTask, client: int) -> list[tuple[int, ...]]:
    """The tokens of each of a client's examples."""
    batch = task.batch(client, torch.arange(task.num_examples(client)), torch.Generator())
    return [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(batch.ids, batch.mask, strict=True)]


def answer_losses(module: nn.Module, examples: Iterable[tuple[list[int], list[int]]]) -> list[float]:
    """The loss of every token of the answers, by the whole model on one unpadded text after another."""
    losses: list[float] = []
    for asked, said in examples:
        logits = module(input_ids=torch.tensor([asked + said])).logits[0].detach()
        losses += cross_entropy(logits[len(asked) - 1 : -1], torch.tensor(said), reduction="none").tolist()
    return losses


def test_the_loss_is_on_the_answers_alone(task: MathInstructTask) -> None:
    module, rows = task.network(0).eval(), torch.tensor([2, 0, 5])
    loss = task.loss(module, task.batch(1, rows, torch.Generator()))
    by_tokens = {tuple(asked + said): (asked, said) for asked, said in map(encoded, in_file(task, "train.jsonl"))}
    mine = examples_of(task, 1)
    losses = answer_losses(module, [by_tokens[mine[row]] for row in rows.tolist()])
    assert float(loss.detach()) == pytest.approx(np.mean(losses), rel=1e-5)


def test_questions_are_held_out_of_what_the_clients_have(task: MathInstructTask) -> None:
    every = in_file(task, "train.jsonl")
    held, kept = split_unlabeled(every, 5, 0, "gsm8k-train", 3)
    asked = [each.question for each in every]
    assert len(set(asked)) < len(asked) == 50, "some are asked twice"
    assert len({each.question for each in held}) == len(held) == 5
    assert [each.question for each in kept] == [text for text in asked if text not in {each.question for each in held}]
    there = Counter(example for client in range(3) for example in examples_of(task, client))
    assert there == Counter(tuple(question + answer) for question, answer in map(encoded, kept))
    assert {each.line for each in split_unlabeled(every, 5, 1, "gsm8k-train", 3)[0]} != {each.line for each in held}


def test_logits_are_the_head_of_the_hidden_states(task: MathInstructTask) -> None:
    module, rows = task.network(0).eval(), torch.arange(5)
    assert torch.equal(task.logits(module, rows), task.head(module)(task.hidden(module, rows)))
    answers = replace(task, unlabeled_part="answer")
    assert int(answers.position_counts().sum()) != int(task.position_counts().sum())
    assert len(answers.hidden(module, rows)) == int(answers.position_counts().sum())


def test_lora_trains_and_sends_the_adapters_alone(task: MathInstructTask) -> None:
    lora = replace(task, lora_rank=2)
    module = lora.network(0)
    layout = Layout.of(module)
    assert all("lora_" in part.name for part in layout.params)
    # Four projections of 16 x 16, two of 16 x 32 and one of 32 x 16, in two layers; the head has none.
    assert layout.num_params == 2 * 2 * (4 * (16 + 16) + 3 * (16 + 32))
    assert torch.equal(lora.logits(module.eval(), torch.arange(2)), task.logits(task.network(0).eval(), torch.arange(2)))
    for wrong, name in (("nothing", "nothing"), ("q_proj,vproj", "vproj")):
        with pytest.raises(
            ValueError, match=rf"no layer '{name}'; its linear layers are .*q_proj, up_proj, v_proj \(all-linear"
        ):
            replace(lora, lora_targets=wrong).network(0)
    with pytest.raises(ValueError, match=r"lora_targets 'norm' does not fit this model"):
        replace(lora, lora_targets="norm").network(0)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (3.0, 1.0)])
def test_adapters_are_scaled_by_alpha_over_the_rank(task: MathInstructTask, alpha: float | None, scale: float) -> None:
    """LoRA's own formula, alpha / r; alpha is twice the rank unless it is given."""
    lora = replace(task, lora_rank=3, lora_alpha=alpha, lora_targets="q_proj")
    module = lora.network(0).eval()
    layer = module.get_submodule("model.layers.0.self_attn.q_proj")
    down, up = layer.get_submodule("lora_A.default").weight, layer.get_submodule("lora_B.default").weight
    torch.nn.init.normal_(up, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
    plain = layer.get_submodule("base_layer")(x)
    assert torch.allclose(layer(x), plain + scale * (x @ down.T @ up.T), atol=1e-5)


def test_who_has_what_moves_with_the_seed_and_is_split_by_source_or_steps(task: MathInstructTask, tmp_path: Path) -> None:
    def clients(of: MathInstructTask) -> list[list[tuple[int, ...]]]:
        return [sorted(examples_of(of, client)) for client in range(of.num_clients)]

    same = replace(task, num_unlabeled=0)
    assert clients(same) == clients(replace(same))
    assert clients(same) != clients(replace(same, seed=1))
    rows = [{"source": f"{n % 3}.json", "instruction": f"question {n}", "output": "so 1"} for n in range(60)]
    (tmp_path / "own.json").write_text(json.dumps(rows))
    apart = DirichletPartitioner(alpha=1e-3, min_partition_size=1)
    own = replace(same, train=str(tmp_path / "own.json"), partition=apart)
    source_of = {}
    for each in read_instructions(tmp_path / "own.json"):
        question, answer = encoded(each)
        source_of[tuple(question + answer)] = each.group
    groups = [{source_of[example] for example in examples_of(own, client)} for client in range(3)]
    assert sorted(map(len, groups)) == [1, 1, 1], "with next to no mixing every client has one source"


def test_questions_that_are_asked_again_are_all_held_out(task: MathInstructTask, tmp_path: Path) -> None:
    sources = ("CoT", "PoT", "rft")
    rows = [{"source": s, "instruction": f"question {n}", "output": f"{s} 1"} for s in sources for n in range(20)]
    (tmp_path / "thrice.json").write_text(json.dumps(rows))
    thrice = replace(task, train=str(tmp_path / "thrice.json"), num_unlabeled=7)
    held, kept = split_unlabeled(read_instructions(tmp_path / "thrice.json"), 7, 0, "thrice", 3)
    assert (len(held), len(kept)) == (7, 60 - 3 * 7)
    assert sum(map(thrice.num_examples, range(3))) == len(kept)
    assert not {each.question for each in held} & {each.question for each in kept}
    with pytest.raises(ValueError, match=r"num_unlabeled is 20, but .*thrice\.json has only 20 questions"):
        replace(thrice, num_unlabeled=20).num_examples(0)


def test_greedy_answers_are_those_of_single_unpadded_prompts(task: MathInstructTask) -> None:
    """Batched and padded on the left, against a loop that takes the most likely token."""
    module, made = task.network(0).eval(), tokenizer()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    prompts = [made("Ann has 3")["input_ids"], made("How many ? Bob gets 7 and 9 .")["input_ids"], made("Dan")["input_ids"]]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(module(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == made.eos_token_id:
                break
        expected.append(made.decode(ids[len(prompt) :], skip_special_tokens=True))
    assert greedy_answers(module, made, prompts, 6, 2, "cpu") == expected
    assert len(set(expected)) > 1
    module.generation_config = GenerationConfig(
        do_sample=True, repetition_penalty=1.3, num_beams=3, no_repeat_ngram_size=1, eos_token_id=[2]
    )
    assert greedy_answers(module, made, prompts, 6, 2, "cpu") == expected, "what the model says of generation is not greedy"


def test_the_models_own_ends_are_kept_and_nothing_else_of_its_generation(task: MathInstructTask, tmp_path: Path) -> None:
    folder = save_language_model(tmp_path / "chatty")
    GenerationConfig(eos_token_id=[2, 7], min_length=9, repetition_penalty=1.3, do_sample=True).save_pretrained(folder)
    module = replace(task, model=str(folder)).network(0)
    assert module.generation_config.to_diff_dict().keys() <= {"eos_token_id", "transformers_version", "_from_model_config"}
    assert stop_tokens(module) == [2, 7]
    taken = {}
    module.generate = lambda **options: taken.update(options) or options["input_ids"]
    greedy_answers(module, tokenizer(), [[5, 6]], 6, 2, "cpu")
    assert taken["eos_token_id"] == [2, 7]


@pytest.mark.parametrize(("version", "option"), [("5.22.2", "dtype"), ("4.57.1", "torch_dtype")])
def test_older_libraries_are_asked_in_their_own_words(version: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library("transformers"), "__version__", version)
    assert _in_float32() == {option: torch.float32}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234.50 dollars, not 5", "1234.50"),
        ("#### 8\n#### \nand 9", "8"),
        ("the answer is $12.", "12"),
        ("it falls by -3", "-3"),
        ("between .5 and 2", "2"),
        ("#### none, but 6", "6"),
        ("#### -7", "-7"),
        ("it takes 10-12", "12"),
        ("pages 3-$4", "4"),
        ("a COVID-19", "19"),
        ("5 - -2 = (-$1,000)", "-1000"),
        ("I end with #### and the final number. 3 + 4 = 7\n#### 7", "7"),
        ("####\n9, or 8", "9"),
        ("it is (3,4)", "4"),
        ("1,2,3", "3"),
        ("12,345,678.5 of 1", "1"),
        ("#### 12,345,678.5", "12345678.5"),
        ("#### 1234,5", "1234"),
        ("no idea", None),
    ],
)
def test_the_number_an_answer_comes_to(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_scores(task: MathInstructTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """With answers put into its mouth: a third right; the loss is the mean over the answers' tokens."""
    test = in_file(task, "test.jsonl")
    said = [each.answer if row < 2 else "#### -1" for row, each in enumerate(test)]
    monkeypatch.setattr("fedecho.tasks.text.mathinstruct.greedy_answers", lambda *arguments: said)
    module = task.network(0).eval()
    monkeypatch.setattr("fedecho.tasks.text.mathinstruct.LOSS_CHUNK", 4)  # 4 questions and 2: a mean of means would be another
    scores = task.evaluate(module)
    assert scores["accuracy"] == pytest.approx(2 / 6)
    assert scores["standard_error"] == pytest.approx(sqrt(2 / 6 * 4 / 6 / 6)) == standard_error(2 / 6, 6)
    assert scores["answer_loss"] == pytest.approx(np.mean(answer_losses(module, map(encoded, test))), rel=1e-5)


def test_an_evaluation_of_the_first_few_questions(task: MathInstructTask) -> None:
    few = replace(task, num_test=2)
    module = few.network(0).eval()
    scores = few.evaluate(module)
    assert scores["num_questions"] == 2
    losses = answer_losses(module, map(encoded, in_file(task, "test.jsonl")[:2]))
    assert scores["answer_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(ValueError, match=r"num_test is 7, but gsm8k-test has 6 questions"):
        replace(task, num_test=7).read_inputs(unlabeled=False)


def test_chat_templates_and_models_without_one() -> None:
    chat, plain = Chat(tokenizer(), "{question} !"), Chat(tokenizer(chat=False), "{question} !")
    assert chat.question("How") == "<s>user : How ! </s><s>assistant :"
    assert chat.question_and_answer("How", "So") == ("<s>user : How ! </s><s>assistant :", " So </s>")
    assert plain.question_and_answer("How", "So") == ("Question: How !\nAnswer:", " So</s>")
    base = Chat(tokenizer(chat=False, bos=True), "{question} !")
    assert base.question_and_answer("How", "So") == ("<s>Question: How !\nAnswer:", " So</s>"), (
        "as the tokenizer itself begins a text"
    )
    assert base.tokens([base.question("How")])[0] == base.tokenizer(plain.question("How"))["input_ids"]
    line = Chat(tokenizer(), "{question}")
    line.tokenizer.chat_template = f"{line.tokenizer.chat_template}\n"
    line.tokenizer.chat_template = line.tokenizer.chat_template.replace("</s>{% endfor %}", "</s>\n{% endfor %}")
    assert line.question_and_answer("How", "So")[1] == " So </s>", "what a template writes behind the end is nothing to learn"
    odd = Chat(tokenizer(), "{question}")
    odd.tokenizer.chat_template = "{{ messages | length }}{% if add_generation_prompt %}>{% endif %}"
    assert odd.question_and_answer("How", "So") == ("1>", "So</s>"), (
        "a template that rewrites the past is not trusted with the answer"
    )


def test_a_template_that_writes_the_day_writes_the_same_one_every_day() -> None:
    dated = Chat(tokenizer(), "{question}")
    today = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}Today: {{ date_string }}"
    )
    dated.tokenizer.chat_template = today + TEMPLATE
    assert dated.question("How").startswith("Today: 26 Jul 2024<s>user")
    assert dated.question_and_answer("How", "So")[1] == " So </s>"
    other = Chat(tokenizer(), "{question}")
    for template, said in (
        (
            '{% set today = strftime_now("%A, %Y-%m-%d") %}{{ today }} or {{ strftime_now("%B" ~ "") }}',
            "Friday, 2024-07-26 or July",
        ),
        ("{% set form = '%-d %B' %}{{ strftime_now(form) }}", "26 July"),
        ("{{ strftime_now(format='%Y') }}", "2024"),
        ("\n[start] {{ strftime_now('%y') }}", "\n[start] 24"),
        ("  {% set day = strftime_now('%H:%M') %}{{ day }}", "00:00"),
    ):
        other.tokenizer.chat_template = template + TEMPLATE
        assert other.question("How").startswith(f"{said}<s>user")


def test_texts_that_are_too_long(task: MathInstructTask, tmp_path: Path) -> None:
    save_language_model(tmp_path / "short", room=30)
    short = replace(task, model=str(tmp_path / "short"))
    with pytest.raises(ValueError, match=r"train\.jsonl, line \d+: \d+ tokens exceed the model's limit of 30"):
        short.batch(0, torch.arange(1), torch.Generator())
    with pytest.raises(ValueError, match=r"train\.jsonl, line \d+: its question of \d+ tokens leaves none of the \d+ for"):
        replace(task, max_length=20).batch(0, torch.arange(1), torch.Generator())
    with pytest.raises(
        ValueError, match=r"test\.jsonl, line 1: \d+ tokens and task\.max_new_tokens = 250 exceed the model\'s limit of 256"
    ):
        replace(task, max_new_tokens=250).evaluate(task.network(0).eval())
    longest = max(len(example) for client in range(3) for example in examples_of(task, client))
    cut = replace(task, max_length=longest - 2)
    assert max(len(example) for client in range(3) for example in examples_of(cut, client)) == longest - 2


def test_tokenizers_that_cannot_pad(task: MathInstructTask, tmp_path: Path) -> None:
    save_language_model(tmp_path / "no-pad", pad_token=None)
    bare = replace(task, model=str(tmp_path / "no-pad"))
    with pytest.raises(ValueError, match=r"no-pad has no pad token: set task\.pad_token, for example to '</s>'"):
        bare.position_counts()
    assert replace(bare, pad_token="</s>").position_counts().tolist() == task.position_counts().tolist()
    made = tokenizer(None)
    made.add_special_tokens({"unk_token": "</s>"})
    made.save_pretrained(tmp_path / "no-pad")
    same = replace(bare, pad_token="</s>", max_new_tokens=5)
    assert same.position_counts().tolist() == task.position_counts().tolist(), "as GPT-2, whose end is its unknown token"
    with pytest.raises(ValueError, match=r"task\.pad_token '\[NOPE\]' is not in the vocabulary"):
        replace(bare, pad_token="[NOPE]").position_counts()


def test_what_stands_beside_the_numbers(task: MathInstructTask) -> None:
    assert task.notes["stand_in"] == "tiny-llama in place of Qwen2.5-1.5B-Instruct; gsm8k-train in place of MathInstruct"
    assert task.notes["prompt"] == task.prompt
    assert replace(task, lora_rank=3).notes["trained"] == "LoRA of rank 3 on all-linear"
    assert "stand_in" not in MathInstructTask().notes
    own = (
        MathInstructTask(test="mine.jsonl", num_test=9, lora_rank=4, lora_targets="q_proj,v_proj").notes["stand_in"].split("; ")
    )
    assert own == [
        "mine.jsonl in place of GSM8K's test",
        "LoRA of rank 4 on q_proj and v_proj in place of the whole model",
        "the first 9 questions in place of all",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_clients": 0}, "num_clients must be at least 1, got 0"),
        ({"lora_rank": 0}, "lora_rank must be at least 1, got 0"),
        ({"num_test": 0}, "num_test must be at least 1, got 0"),
        ({"lora_alpha": 32.0}, "need task.lora_rank"),
        ({"lora_targets": "q_proj"}, "need task.lora_rank"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha must be above 0, got 0.0"),
        ({"prompt": "think"}, "prompt must contain {question}, got 'think'"),
        ({"unlabeled_part": "all"}, "unlabeled_part must be 'query' or 'answer', got 'all'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MathInstructTask(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("real", [True, False])
def test_a_gpu_that_emulates_bf16_computes_and_keeps_float32(
    task: MathInstructTask, real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or real)
    assert has_lower("cuda", torch.bfloat16) is real
    lora = replace(task, lora_rank=2, device="cuda").computing_in(torch.bfloat16)
    network = lora.network(0)
    kept = {param.dtype for param in network.parameters() if not param.requires_grad}
    assert kept == {torch.bfloat16 if real else torch.float32}
    assert any(isinstance(module, FusedRMSNorm) for module in network.modules()) is real
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: real)
    assert has_lower("cuda", torch.bfloat16) is real, "a torch that cannot be asked about emulation"
    assert not has_lower("cpu", torch.float32)


def test_u_cannot_be_everything(task: MathInstructTask) -> None:
    with pytest.raises(ValueError, match=r"num_unlabeled is 50, but gsm8k-train has only 47 questions"):
        replace(task, num_unlabeled=50).num_examples(0)

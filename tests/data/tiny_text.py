"""Tiny text models made on the spot: a tokenizer trained on a few sentences, two layers, and data in the official formats."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["the", "a", "cat", "dog", "bird", "sees", "likes", "hears", "red", "blue", "small", "big", "house", "tree"]
NAMES = ["Ann", "Bob", "Cleo", "Dan"]
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }} : {{ message['content'] }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant :{% endif %}"
)


def sentence(dice: random.Random, num: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(num))


def pairs(num: int, seed: int) -> list[tuple[int, str, str]]:
    """(label, first, second): paraphrases share most of their words."""
    dice, found = random.Random(seed), []
    for _ in range(num):
        first, label = sentence(dice, dice.randint(3, 9)), dice.randint(0, 1)
        second = first.replace("the", "a") + ' "' if label else sentence(dice, dice.randint(3, 9))
        found.append((label, first, second))
    return found


def write_mrpc(folder: Path, num_train: int = 60, num_dev: int = 20, num_test: int = 16) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, num) in enumerate({"train": num_train, "dev": num_dev, "test": num_test}.items()):
        first = "index" if part == "test" else "\ufeffQuality"
        lines = [f"{first}\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for row, (label, one, two) in enumerate(pairs(num, seed)):
            lines.append(f"{row if part == 'test' else label}\t{row}\t{row + 1}\t{one}\t{two}")
        (folder / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def questions(num: int, seed: int) -> list[dict[str, str]]:
    dice, found = random.Random(seed), []
    for _ in range(num):
        name, one, two = dice.choice(NAMES), dice.randint(1, 9), dice.randint(1, 9)
        steps = f"{name} has {one} + {two} = <<{one}+{two}={one + two}>>{one + two} .\n" * dice.randint(1, 3)
        found.append({"question": f"{name} has {one} and gets {two} . How many ?", "answer": f"{steps}#### {one + two}"})
    return found


def write_gsm8k(folder: Path, num_train: int = 50, num_test: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, num) in enumerate({"train": num_train, "test": num_test}.items()):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions(num, seed)))
    return folder


def tokenizer(pad_token: str | None = "<pad>", chat: bool = True, pair: bool = False, bos: bool = False) -> Any:
    """Byte-level BPE: every text can be written. ``pair``: it says which sentence a token is of; ``bos``: it adds <s> itself."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = [" ".join(map(str, row)) for row in pairs(50, 9)]
    corpus += [f"{row['question']} {row['answer']}" for row in questions(50, 9)]
    raw.train_from_iterator(corpus, trainer)
    if pair or bos:
        end = " </s>" if pair else ""
        raw.post_processor = processors.TemplateProcessing(
            single=f"<s> $A{end}", pair=f"<s> $A{end} $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    names = ["input_ids", "token_type_ids", "attention_mask"] if pair else ["input_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token=pad_token, model_input_names=names
    )
    made.chat_template = TEMPLATE if chat else None
    return made


def save_classifier(folder: Path, dropout: float = 0.1, room: int = 80) -> Path:
    made = tokenizer(pair=True)
    config = BertConfig(
        vocab_size=len(made),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=room,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def save_language_model(folder: Path, *, tied: bool = False, pad_token: str | None = "<pad>", room: int = 256) -> Path:
    made = tokenizer(pad_token)
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=room,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def write_world(folder: Path) -> Path:
    """A data folder with everything in it: MRPC, GSM8K, a classifier and a language model."""
    write_mrpc(folder / "MRPC")
    write_gsm8k(folder / "gsm8k")
    save_classifier(folder / "tiny-bert")
    save_language_model(folder / "tiny-llama")
    return folder

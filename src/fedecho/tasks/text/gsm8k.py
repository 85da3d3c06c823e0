"""GSM8K's score: greedy generation with a static key-value cache, and the number after ####."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from inspect import signature
from math import sqrt
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from fedecho.core.task import at
from fedecho.tasks.text.batches import Ragged
from fedecho.tasks.text.pretrained import library, stop_tokens
from fedecho.tasks.text.readers import BadLine, Worked


@dataclass
class Room:
    """Takes the place of ``update`` in one layer of a cache that grows: the same answers.

    It knows its layer weakly, so that both go, and gigabytes with them, as soon as nobody uses the cache.
    """

    layer: Any
    length: int
    keys: Tensor | None = None
    values: Tensor | None = None
    used: int = 0

    def __call__(self, key_states: Tensor, value_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.layer.lazy_initialization(key_states, value_states)
            self.keys, self.values = self._room_for(key_states), self._room_for(value_states)
        end = self.used + key_states.shape[-2]
        self.keys[..., self.used : end, :] = key_states
        self.values[..., self.used : end, :] = value_states
        self.used = end
        self.layer.keys, self.layer.values = self.keys[..., :end, :], self.values[..., :end, :]
        return self.layer.keys, self.layer.values

    def _room_for(self, states: Tensor) -> Tensor:
        return states.new_empty(*states.shape[:-2], self.length, states.shape[-1])


def cache_with_room(model: Any, length: int) -> Any:
    """A cache for one generation of at most ``length`` tokens; None, which is the model's own, if that is not of the plain kind."""
    transformers, plain = library("transformers"), library("transformers.cache_utils").DynamicLayer
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    if "past_key_values" not in signature(model.forward).parameters or {type(layer) for layer in cache.layers} != {plain}:
        return None
    for layer in cache.layers:
        layer.update = Room(proxy(layer), length)
    return cache


NUMBER = r"(?:(?<!\w)-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""A sign is no sign behind a letter or a digit: "10-12" ends with 12. Commas are between thousands: "1,2,3" are three numbers."""
NUMBERS, MARKED = re.compile(NUMBER), re.compile(rf"####\s*({NUMBER})")


def final_number(text: str) -> Decimal | None:
    """The number that an answer comes to: the first that stands right behind a ####, else the last of all.

    >>> final_number("so 3 + 4 = 7\\n#### 1,007.50"), final_number("it is $12."), final_number("I do not know")
    (Decimal('1007.50'), Decimal('12'), None)
    """
    marked = MARKED.search(text)
    chosen = marked[1] if marked else (NUMBERS.findall(text) or [None])[-1]
    if chosen is None:
        return None
    try:
        return Decimal(chosen.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def judged(every: list[Worked], num: int | None, name: str) -> list[Worked]:
    """The first ``num`` questions, or all, if every answer comes to a number that can be compared."""
    if num is not None and num > len(every):
        raise ValueError(f"task.num_test is {num}, but {name} has {len(every)} questions")
    for each in every[:num]:
        if final_number(each.answer) is None:
            raise BadLine(each.path, each.line, "its answer holds no number, so no model's answer can be right")
    return every[:num]


def standard_error(share: float, num: int) -> float:
    return sqrt(share * (1 - share) / num)


@dataclass(frozen=True)
class Breaks:
    """Between two tokens of a batch: says how many answers are done, or how much of them all; ends no text."""

    done: int
    by_token: float
    width: int
    total: int

    def __call__(self, made: Tensor, scores: Any, **more: Any) -> Tensor:
        at(self.done + int(self.by_token * (made.shape[1] - self.width)), self.total)
        return torch.zeros(len(made), dtype=torch.bool, device=made.device)


def greedy_answers(
    module: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int, device: str
) -> list[str]:
    """The model's most likely continuations, in the order of the prompts; those of like length are padded on the left together."""
    ragged = Ragged.of(prompts, device)
    answers = [""] * len(prompts)
    model: Any = module
    stops = sorted({*stop_tokens(model), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
    # Every one of them in so many words: what is left out is taken from the model's own generation_config.
    greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    greedy |= {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": stops or None}
    done = 0
    for rows in ragged.lengths.argsort(descending=True, stable=True).split(batch_size):
        ids, mask = ragged.padded(rows, tokenizer.pad_token_id, left=True)
        breaks = Breaks(done, len(rows) / max_new_tokens, ids.shape[1], len(prompts))
        cache = cache_with_room(model, ids.shape[1] + max_new_tokens)
        kept = {} if cache is None else {"past_key_values": cache}
        with torch.no_grad():
            made = model.generate(input_ids=ids, attention_mask=mask, stopping_criteria=[breaks], **kept, **greedy)
        done += len(rows)
        texts = tokenizer.batch_decode(made[:, ids.shape[1] :].cpu(), skip_special_tokens=True)
        for row, text in zip(rows.tolist(), texts, strict=True):
            answers[row] = text
    return answers

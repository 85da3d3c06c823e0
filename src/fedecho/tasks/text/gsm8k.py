"""GSM8K scoring: greedy generation with a static key-value cache, and comparison of the final numbers."""

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

from fedecho.core.task import report_progress
from fedecho.tasks.text.batches import Ragged
from fedecho.tasks.text.pretrained import library, stop_tokens
from fedecho.tasks.text.readers import LineError, WorkedExample


@dataclass
class StaticLayerCache:
    """Replaces ``update`` of one layer of a dynamic cache by writes into preallocated memory; the results are the same.

    ``layer`` is a weak proxy, so that gigabytes of cache are freed as soon as the cache is no longer used.
    """

    layer: Any
    length: int
    keys: Tensor | None = None
    values: Tensor | None = None
    used: int = 0

    def __call__(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.layer.lazy_initialization(key_states, value_states)
            self.keys, self.values = self._allocated(key_states), self._allocated(value_states)
        end = self.used + key_states.shape[-2]
        self.keys[..., self.used : end, :] = key_states
        self.values[..., self.used : end, :] = value_states
        self.used = end
        self.layer.keys, self.layer.values = self.keys[..., :end, :], self.values[..., :end, :]
        return self.layer.keys, self.layer.values

    def _allocated(self, states: Tensor) -> Tensor:
        return states.new_empty(*states.shape[:-2], self.length, states.shape[-1])


def static_cache(model: Any, length: int) -> Any:
    """Return a cache for one generation of at most ``length`` tokens, or None if the model needs another kind."""
    transformers, dynamic_layer = library("transformers"), library("transformers.cache_utils").DynamicLayer
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = {type(layer) for layer in cache.layers}
    if "past_key_values" not in signature(model.forward).parameters or kinds != {dynamic_layer}:
        return None
    for layer in cache.layers:
        layer.update = StaticLayerCache(proxy(layer), length)
    return cache


NUMBER = r"(?:(?<!\w)-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""A minus after a letter or digit is not a sign: "10-12" ends with 12. Commas separate thousands: "1,2,3" is three numbers."""
NUMBERS, MARKED = re.compile(NUMBER), re.compile(rf"####\s*({NUMBER})")


def final_number(text: str) -> Decimal | None:
    """Return an answer's result: the first number directly after ####, else the last number.

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


def questions_to_grade(examples: list[WorkedExample], num: int | None, name: str) -> list[WorkedExample]:
    """Return the first ``num`` questions, or all; raise if an answer contains no number to compare with."""
    if num is not None and num > len(examples):
        raise ValueError(f"task.num_test is {num}, but {name} has {len(examples)} questions")
    for example in examples[:num]:
        if final_number(example.answer) is None:
            raise LineError(example.path, example.line, "its answer contains no number, so no model's answer can be right")
    return examples[:num]


def standard_error(share: float, num: int) -> float:
    """Return the standard error of a share of ``num`` examples."""
    return sqrt(share * (1 - share) / num)


@dataclass(frozen=True)
class ProgressReporter:
    """A stopping criterion that never stops a text: it reports the progress of the evaluation after every token."""

    done: int
    by_token: float
    width: int
    total: int

    def __call__(self, tokens: Tensor, scores: Any, **options: Any) -> Tensor:
        report_progress(self.done + int(self.by_token * (tokens.shape[1] - self.width)), self.total)
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)


def greedy_answers(
    module: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int, device: str
) -> list[str]:
    """Generate greedy continuations in the order of the prompts; prompts of similar length share a left-padded batch."""
    ragged = Ragged.of(prompts, device)
    answers = [""] * len(prompts)
    model: Any = module
    stops = sorted({*stop_tokens(model), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
    # Set every option explicitly: omitted ones come from the model's own generation_config.
    greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    greedy |= {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": stops or None}
    done = 0
    for rows in ragged.lengths.argsort(descending=True, stable=True).split(batch_size):
        ids, mask = ragged.padded(rows, tokenizer.pad_token_id, left=True)
        progress = ProgressReporter(done, len(rows) / max_new_tokens, ids.shape[1], len(prompts))
        cache = static_cache(model, ids.shape[1] + max_new_tokens)
        cache_option = {} if cache is None else {"past_key_values": cache}
        with torch.no_grad():
            generated = model.generate(
                input_ids=ids, attention_mask=mask, stopping_criteria=[progress], **cache_option, **greedy
            )
        done += len(rows)
        texts = tokenizer.batch_decode(generated[:, ids.shape[1] :].cpu(), skip_special_tokens=True)
        for row, text in zip(rows.tolist(), texts, strict=True):
            answers[row] = text
    return answers

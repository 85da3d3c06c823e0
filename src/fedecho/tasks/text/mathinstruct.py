"""Maths word problems (MathInstruct, GSM8K or your own instructions) on any causal language model, evaluated on GSM8K."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.ranges import NumClients, Seed, at_least, check_ranges, positive
from fedecho.core.task import report_progress
from fedecho.tasks.classification import seeded
from fedecho.tasks.data_files import MATH_FILES
from fedecho.tasks.partition import DirichletPartitioner, Partitioner, Parts, as_parts
from fedecho.tasks.text.adapters import ALL_LINEAR, lean, merged, with_lora
from fedecho.tasks.text.batches import RoundUp, SpanBatch, Spans, own_text_only
from fedecho.tasks.text.chat import PROMPT, Chat, Part
from fedecho.tasks.text.gsm8k import final_number, greedy_answers, questions_to_grade, standard_error
from fedecho.tasks.text.pretrained import language_model, save_pretrained, supports_packing
from fedecho.tasks.text.readers import LineError, WorkedExample, read_instructions, split_unlabeled
from fedecho.tasks.text.shared import TextTask, file_of, has_lower, stand_in

PAPER_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
LOSS_CHUNK = 16
TOKENS_TO, POSITIONS_TO = 64, 512
"""Multiples to which a batch's tokens and predicted positions are rounded up if batches must have few shapes."""
WIDTH_TO, ROWS_TO = 512, 2
"""Multiples for the width and the number of rows if several texts share a row."""


@dataclass(frozen=True, kw_only=True)
class MathInstructTask(TextTask):
    """Question answering, with the loss on the answers only; ``num_unlabeled`` questions are held out as U.

    With ``lora_rank``, low-rank adapters are trained and only they are communicated; without it, the whole model.
    ``unlabeled_part`` selects what is predicted on U: every token of the query, or the answer. An evaluation generates
    ``num_test`` answers (None: all) and reports the loss of the same questions' reference answers.
    """

    model: str = PAPER_MODEL
    train: str = "mathinstruct"
    test: str = "gsm8k-test"
    num_clients: NumClients = 10
    partition: Partitioner = field(default_factory=lambda: DirichletPartitioner(alpha=0.6))
    num_unlabeled: Annotated[int, at_least(0, most=10**8)] = 100
    unlabeled_part: Part = "query"
    lora_rank: Annotated[int, at_least(1, most=2**16)] | None = None
    lora_alpha: Annotated[float, positive(most=1e6)] | None = None
    lora_targets: str = ALL_LINEAR
    prompt: str = PROMPT
    max_length: Annotated[int, at_least(1, most=2**20)] | None = None
    max_new_tokens: Annotated[int, at_least(1, most=2**20)] = 256
    num_test: Annotated[int, at_least(1)] | None = None
    eval_batch: Annotated[int, at_least(1, most=10**6)] = 64
    pad_token: str | None = None
    data_dir: str | None = None
    seed: Seed | None = None
    device: str = field(default="cpu", repr=False, compare=False)
    compute: torch.dtype = field(default=torch.float32, repr=False, compare=False)
    few_shapes: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ranges(self, "task.")
        if self.lora_rank is None and (self.lora_alpha is not None or self.lora_targets != ALL_LINEAR):
            raise ValueError("task.lora_alpha and task.lora_targets need task.lora_rank: set it too, or omit them")
        if "{question}" not in self.prompt:
            raise ValueError(f"task.prompt must contain {{question}}, got {self.prompt!r}")

    def network(self, seed: int) -> nn.Module:
        return seeded(seed, self._network)

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> SpanBatch:
        examples = torch.from_numpy(self._parts[client])[rows]
        spans, max_tokens = self._train_spans, self._max_tokens
        if not self.few_shapes:
            return spans.batch(examples)
        tokens_to, positions_to = RoundUp(TOKENS_TO, most=max_tokens, spare=1), RoundUp(POSITIONS_TO)
        if not self._supports_packing:
            return spans.batch(examples, tokens_to, positions_to)
        return spans.in_few_shapes(examples, tokens_to, RoundUp(WIDTH_TO, most=max_tokens), RoundUp(ROWS_TO), positions_to)

    @cached_property
    def _supports_packing(self) -> bool:
        return supports_packing(self._folder)

    def loss(self, module: nn.Module, batch: SpanBatch) -> Tensor:
        return cross_entropy(self._logits(module, batch), batch.targets)

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        return self._logits(module, self._unlabeled_spans.batch(rows))

    def hidden(self, module: nn.Module, rows: Tensor) -> Tensor:
        return self._hidden(module, self._unlabeled_spans.batch(rows))

    def head(self, module: nn.Module) -> nn.Module:
        model: Any = module
        return model.get_output_embeddings()  # type: ignore[no-any-return]

    def position_counts(self) -> Tensor:
        return self._unlabeled_spans.counts

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """Return GSM8K accuracy with its standard error, and the mean token loss of the reference answers."""
        prompts = self._prompts
        with self._computing():
            answers = greedy_answers(module, self._tokenizer, prompts, self.max_new_tokens, self.eval_batch, self.device)
        expected = [final_number(each.answer) for each in self._test_set]
        right = [final_number(text) == number for text, number in zip(answers, expected, strict=True)]
        accuracy = sum(right) / len(right)
        return {
            "accuracy": accuracy,
            "standard_error": standard_error(accuracy, len(right)),
            "answer_loss": self._answer_loss(module),
            "num_questions": len(right),
        }

    def save(self, module: nn.Module, folder: Path) -> None:
        """Save the model, with merged adapters and tokenizer, for ``AutoModelForCausalLM.from_pretrained``."""
        save_pretrained(merged(module), self._tokenizer, folder)

    def read_inputs(self, unlabeled: bool) -> Mapping[str, str]:
        """Read all input files and return their digests (see ``HasInputs``); U is part of ``train``."""
        _ = (self._train_spans, self._parts, self._prompts, self._test_spans, self._unlabeled_spans if unlabeled else None)
        return self._digests(MATH_FILES, train=self.train, test=self.test)

    @property
    def provenance(self) -> str:
        """Describe the unlabeled set U."""
        return f"{self.num_unlabeled} questions held out of {self.train}, {self.unlabeled_part} tokens"

    @property
    def notes(self) -> dict[str, str]:
        """Describe the setup, for display beside results."""
        notes = {
            "model": self.model,
            "trained": "the whole model" if self.lora_rank is None else f"LoRA of rank {self.lora_rank} on {self.lora_targets}",
            "train": self.train,
            "judged on": f"{self.test}, greedy, at most {self.max_new_tokens} new tokens",
            "prompt": self.prompt,
            "stand_in": "; ".join(self._stand_ins()),
        }
        return {key: text for key, text in notes.items() if text}

    def _stand_ins(self) -> list[str]:
        """Describe every deviation from the paper's setup."""
        targets = self.lora_targets.replace(",", " and ")
        deviations = {
            stand_in(self.model, PAPER_MODEL): True,
            f"{self.train} in place of MathInstruct": self.train != "mathinstruct",
            f"{self.test} in place of GSM8K's test": self.test != "gsm8k-test",
            f"LoRA of rank {self.lora_rank} on {targets} in place of the whole model": self.lora_rank is not None,
            f"the first {self.num_test} questions in place of all": self.num_test is not None,
        }
        return [text for text, applies in deviations.items() if text and applies]

    def _pretrained(self) -> nn.Module:
        return language_model(self._folder)

    def _network(self) -> nn.Module:
        model = self._pretrained()
        if self.lora_rank is None:
            return model
        adapted = with_lora(model, self.lora_rank, self.lora_alpha or 2.0 * self.lora_rank, self.lora_targets)
        if has_lower(self.device, self.compute):
            adapted = lean(adapted)
            for param in adapted.parameters():  # frozen weights need not be cast at every step
                param.data = param.data if param.requires_grad else param.data.to(self.compute)
        return adapted

    def _hidden(self, module: nn.Module, batch: SpanBatch) -> Tensor:
        """Return hidden states [positions, width] only where predictions count, so that the head skips questions and padding."""
        model: Any = module
        attention: dict[str, Any] = {"attention_mask": batch.mask}
        if batch.text is not None:
            dtype = self.compute if has_lower(self.device, self.compute) else torch.float32
            attention = {"attention_mask": own_text_only(batch.text, dtype), "position_ids": batch.position}
        with self._computing():
            states = model.base_model(input_ids=batch.ids, use_cache=False, **attention).last_hidden_state
        hidden: Tensor = states[batch.row, batch.column]
        return hidden

    def _logits(self, module: nn.Module, batch: SpanBatch) -> Tensor:
        hidden = self._hidden(module, batch)
        with self._computing():
            logits: Tensor = self.head(module)(hidden)
        return logits.float()

    def _answer_loss(self, module: nn.Module) -> float:
        total, order = 0.0, self._test_spans.tokens.lengths.argsort(stable=True)
        with torch.no_grad():
            for number, rows in enumerate(order.split(LOSS_CHUNK)):
                report_progress(number * LOSS_CHUNK, len(order))
                batch = self._test_spans.batch(rows)
                total += float(cross_entropy(self._logits(module, batch), batch.targets, reduction="sum"))
        return total / int(self._test_spans.counts.sum())

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self._tokenizer, self.prompt)

    @cached_property
    def _split(self) -> tuple[list[WorkedExample], list[WorkedExample]]:
        """Return (U, the clients' examples); the seed selects the questions held out."""
        examples = read_instructions(file_of("task.train", self.train, MATH_FILES, self.data_dir))
        return split_unlabeled(examples, self.num_unlabeled, self.seed or 0, self.train, self.num_clients)

    @cached_property
    def _parts(self) -> Parts:
        groups = np.unique([each.group for each in self._split[1]], return_inverse=True)[1]
        return as_parts(self.partition.split(groups, self.num_clients, self.seed or 0))

    @cached_property
    def _test_set(self) -> list[WorkedExample]:
        return questions_to_grade(
            read_instructions(file_of("task.test", self.test, MATH_FILES, self.data_dir)), self.num_test, self.test
        )

    @cached_property
    def _prompts(self) -> list[list[int]]:
        prompts = self._chat.tokens([self._chat.question(each.question) for each in self._test_set])
        for text, prompt in zip(self._test_set, prompts, strict=True):
            if len(prompt) + self.max_new_tokens > self._limit:
                total = f"{len(prompt)} tokens and task.max_new_tokens = {self.max_new_tokens}"
                raise LineError(
                    text.path, text.line, f"{total} exceed the model's limit of {self._limit}: lower task.max_new_tokens"
                )
        self._check_rows(prompts, self._test_set, self._limit)
        return prompts

    @cached_property
    def _train_spans(self) -> Spans:
        return self._spans(self._split[1], "answer")

    @cached_property
    def _unlabeled_spans(self) -> Spans:
        return self._spans(self._split[0], self.unlabeled_part)

    @cached_property
    def _test_spans(self) -> Spans:
        return self._spans(self._test_set, "answer")

    def _spans(self, texts: Sequence[WorkedExample], part: Part) -> Spans:
        rows, first, end = self._chat.rows(texts, part, self._max_tokens, cut=self.max_length is not None)
        self._check_rows(rows, texts, self._max_tokens)
        return Spans.of(rows, first, end, self._tokenizer.pad_token_id, self.device)

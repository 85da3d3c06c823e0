"""Paraphrase detection (GLUE's MRPC) or your own sentence pairs, on any pretrained text classifier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho.core.randomness import numpy_rng
from fedecho.core.ranges import NumClients, Seed, at_least, check_ranges
from fedecho.core.task import report_progress
from fedecho.gpu.streams import to_device
from fedecho.tasks.classification import seeded
from fedecho.tasks.data_files import MRPC_FILES
from fedecho.tasks.partition import DirichletPartitioner, Partitioner, Parts, as_parts
from fedecho.tasks.text.batches import Ragged, RoundUp
from fedecho.tasks.text.pretrained import TYPES, classifier, save_pretrained, uses_token_types
from fedecho.tasks.text.readers import LineError, SentencePair, read_pairs
from fedecho.tasks.text.shared import TextTask, between_sentences, file_of, stand_in

PAPER_MODEL = "google-bert/bert-base-uncased"
EVAL_CHUNK = 128
TOKENS_TO = 16
"""Multiple to which a batch's tokens are rounded up if batches must have few shapes."""

Inputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class MrpcTask(TextTask):
    """Sentence-pair classification, evaluated on the validation set. U is ``unlabeled_size`` test pairs (or "all") without labels.

    ``model`` is a folder or a hub name. ``train``, ``dev`` and ``unlabeled`` may be your own .tsv or .jsonl files with the
    columns sentence1, sentence2 and label.
    """

    model: str = PAPER_MODEL
    train: str = "mrpc-train"
    dev: str = "mrpc-dev"
    unlabeled: str = "mrpc-test"
    unlabeled_size: Annotated[int, at_least(0, most=10**8, note=" or 'all'")] | Literal["all"] = 100
    num_clients: NumClients = 10
    partition: Partitioner = field(default_factory=lambda: DirichletPartitioner(alpha=0.6))
    max_length: Annotated[int, at_least(8, most=2**20)] | None = None
    pad_token: str | None = None
    data_dir: str | None = None
    seed: Seed | None = None
    device: str = field(default="cpu", repr=False, compare=False)
    compute: torch.dtype = field(default=torch.float32, repr=False, compare=False)
    few_shapes: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ranges(self, "task.")

    @property
    def num_unlabeled(self) -> int:
        return len(self._unlabeled_pairs) if self.unlabeled_size == "all" else self.unlabeled_size

    def network(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: classifier(self._folder, self._num_labels, self._tokenizer.pad_token_id))

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Inputs, Tensor]:
        examples = torch.from_numpy(self._parts[client])[rows]
        to = RoundUp(TOKENS_TO, most=self._max_tokens, spare=1) if self.few_shapes else None
        return self._train_tokens.padded(examples, to), self._labels[to_device(examples, self.device)]

    def loss(self, module: nn.Module, batch: tuple[Inputs, Tensor]) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self._forward(module, inputs), labels)

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        return self._forward(module, self._unlabeled_tokens.padded(rows))

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        with torch.no_grad():
            pieces = []
            for number, (inputs, _) in enumerate(self._dev):
                report_progress(number, len(self._dev))
                pieces.append(self._forward(module, inputs))
        logits = torch.cat(pieces)
        labels = torch.cat([labels for _, labels in self._dev])
        guesses = logits.argmax(dim=-1)
        return {
            "accuracy": int((guesses == labels).sum()) / len(labels),
            "f1": f1_score(guesses.cpu(), labels.cpu(), self._num_labels),
            "loss": float(cross_entropy(logits, labels)),
        }

    def save(self, module: nn.Module, folder: Path) -> None:
        """Save model and tokenizer for ``AutoModelForSequenceClassification.from_pretrained``."""
        save_pretrained(module, self._tokenizer, folder)

    def read_inputs(self, unlabeled: bool) -> Mapping[str, str]:
        """Read all input files and return their digests (see ``HasInputs``)."""
        _ = (self._train_tokens, self._parts, self._dev, self._unlabeled_tokens if unlabeled else None)
        of_unlabeled = {"unlabeled": self.unlabeled} if unlabeled else {}
        return self._digests(MRPC_FILES, train=self.train, dev=self.dev, **of_unlabeled)

    @property
    def provenance(self) -> str:
        """Describe the unlabeled set U."""
        return f"{self.num_unlabeled} pairs of {self.unlabeled}, labels not read"

    @property
    def notes(self) -> dict[str, str]:
        """Describe the setup, for display beside results."""
        own = {"mrpc-train": self.train, "mrpc-dev": self.dev, "mrpc-test": self.unlabeled}
        stand_ins = [
            stand_in(self.model, PAPER_MODEL),
            *(f"{ours} in place of {name}" for name, ours in own.items() if ours != name),
        ]
        notes = {"model": self.model, "train": self.train, "judged on": self.dev}
        notes["stand_in"] = "; ".join(text for text in stand_ins if text)
        return {key: text for key, text in notes.items() if text}

    def _forward(self, module: nn.Module, inputs: Inputs) -> Tensor:
        with self._computing():
            logits: Tensor = module(**inputs).logits
        return logits.float()

    @cached_property
    def _separator(self) -> str:
        return between_sentences(self._tokenizer)

    @cached_property
    def _train_pairs(self) -> list[SentencePair]:
        return read_pairs(file_of("task.train", self.train, MRPC_FILES, self.data_dir), labelled=True)

    @cached_property
    def _num_labels(self) -> int:
        return num_classes(self._train_pairs)

    @cached_property
    def _unlabeled_pairs(self) -> list[SentencePair]:
        pairs = read_pairs(file_of("task.unlabeled", self.unlabeled, MRPC_FILES, self.data_dir), labelled=False)
        if self.unlabeled_size == "all":
            return pairs
        if self.unlabeled_size > len(pairs):
            raise ValueError(f"task.unlabeled_size is {self.unlabeled_size}, but {self.unlabeled} has {len(pairs)} pairs")
        drawn = numpy_rng(self.seed or 0, "unlabeled").permutation(len(pairs))[: self.unlabeled_size]
        return [pairs[row] for row in drawn]

    @cached_property
    def _parts(self) -> Parts:
        labels = np.array([pair.label for pair in self._train_pairs])
        return as_parts(self.partition.split(labels, self.num_clients, self.seed or 0))

    @cached_property
    def _labels(self) -> Tensor:
        return torch.tensor([pair.label for pair in self._train_pairs]).to(self.device)

    @cached_property
    def _train_tokens(self) -> "Tokens":
        return self._tokens(self._train_pairs)

    @cached_property
    def _unlabeled_tokens(self) -> "Tokens":
        return self._tokens(self._unlabeled_pairs)

    @cached_property
    def _dev(self) -> list[tuple[Inputs, Tensor]]:
        """Batches of pairs of similar length, padded once."""
        pairs = read_pairs(file_of("task.dev", self.dev, MRPC_FILES, self.data_dir), labelled=True)
        for pair in pairs:
            if (pair.label or 0) >= self._num_labels:
                raise ValueError(f"{pair.path}, line {pair.line}: class {pair.label} is not in {self.train}")
        tokens, labels = self._tokens(pairs), torch.tensor([pair.label for pair in pairs])
        order = tokens.ids.lengths.argsort(stable=True)
        return [(tokens.padded(rows), labels[rows].to(self.device)) for rows in order.split(EVAL_CHUNK)]

    def _tokens(self, pairs: Sequence[SentencePair]) -> "Tokens":
        max_tokens = self._max_tokens
        truncation = {} if self.max_length is None else {"truncation": True, "max_length": max_tokens}
        seconds = [f"{self._separator}{pair.second}" for pair in pairs]
        encoded = self._tokenizer([pair.first for pair in pairs], seconds, verbose=False, **truncation)
        self._check_rows(encoded["input_ids"], pairs, max_tokens)
        types = encoded.get(TYPES) if uses_token_types(self._folder, self._tokenizer) else None
        return Tokens(
            Ragged.of(encoded["input_ids"], self.device),
            None if types is None else Ragged.of(types, self.device),
            self._tokenizer.pad_token_id,
        )


@dataclass(frozen=True)
class Tokens:
    """Tokenized pairs on the device, with the sentence number of each token for models that use it."""

    ids: Ragged
    types: Ragged | None
    fill: int

    def padded(self, rows: Tensor, to: RoundUp | None = None) -> Inputs:
        ids, mask = self.ids.padded(rows, self.fill, to=to)
        inputs = {"input_ids": ids, "attention_mask": mask}
        return inputs if self.types is None else inputs | {TYPES: self.types.padded(rows, 0, to=to)[0]}


def num_classes(pairs: Sequence[SentencePair]) -> int:
    """Return the number of classes, at least two; raise if the labels 0 to n - 1 have a gap."""
    labels = {pair.label or 0 for pair in pairs}
    complete = next(number for number in range(len(labels) + 1) if number not in labels)
    count = max(2, complete)
    for pair in pairs:
        if (pair.label or 0) >= count:
            raise LineError(
                pair.path,
                pair.line,
                f"label {pair.label}, but no pair has label {complete}: number the classes 0, 1, ... without gaps",
            )
    return count


def f1_score(guesses: Tensor, labels: Tensor, num_labels: int) -> float:
    """Return the F1 score of class 1 if there are two classes (as in GLUE), else the unweighted mean over classes."""

    def of(label: int) -> float:
        right = int(((guesses == label) & (labels == label)).sum())
        return 2 * right / max(int((guesses == label).sum() + (labels == label).sum()), 1)

    return of(1) if num_labels == 2 else sum(map(of, range(num_labels))) / num_labels

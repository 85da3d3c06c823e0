"""Milliseconds of one training step on text, eager against replayed: AdamW on batches of random tokens.

    python -m benchmarks.text_steps [--device cuda] [--precision fp32] [--steps 100] [--models minilm,llama] [--json FILE]

The models are made on the spot with random weights, which changes no time: BERT of all-MiniLM-L6-v2's size (6 layers, width 384),
batch 8, 64 tokens with padding; or Llama of SmolLM2-135M's size with LoRA of rank 16, batch 32, 256 tokens. On a
CPU "replayed" is the same work done at once, so nothing is gained there.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.arguments import at_least_one, listed, need_gpu
from benchmarks.kept import keep
from fedecho.core.capture import Precision
from fedecho.core.layout import Layout
from fedecho.core.types import Dispatch, GlobalModel
from fedecho.data.parts import Parts, as_parts
from fedecho.data.ragged import Ragged
from fedecho.data.spans import Spans
from fedecho.experiments.execution import DTYPES
from fedecho.experiments.gpu import gpu_settings, the_gpu
from fedecho.learning import LocalTraining, Trainer
from fedecho.learning.replayed import ReplayedSteps
from fedecho.models.pretrained import library
from fedecho.tasks.mathinstruct import MathInstructTask
from fedecho.tasks.mrpc import MrpcTask, Tokens

MINILM = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
SMOLLM = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM |= {"intermediate_size": 1536, "max_position_embeddings": 2048, "tie_word_embeddings": True}
NUM_ROWS = 512


def rows_of(least: int, most: int, vocabulary: int) -> list[list[int]]:
    """Random tokens; the first row of every eight is as long as can be, so that all batches have one shape."""
    rng = np.random.default_rng(0)
    lengths = [most if row % 8 == 0 else int(rng.integers(least, most + 1)) for row in range(NUM_ROWS)]
    return [rng.integers(5, vocabulary, length).tolist() for length in lengths]


class OneClient:
    """All rows are one client's, and the first of a batch is a longest one."""

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Any:
        task: Any = super()
        return task.batch(client, rows - rows % 8 + torch.arange(len(rows)) % 8, generator)

    @cached_property
    def _parts(self) -> Parts:
        return as_parts([np.arange(NUM_ROWS)])


@dataclass(frozen=True, kw_only=True)
class RandomPairs(OneClient, MrpcTask):
    """MRPC's training on random tokens and random weights."""

    num_clients: int = 1
    layers: int = MINILM["num_hidden_layers"]

    def network(self, seed: int) -> nn.Module:
        transformers = library("transformers")
        model: nn.Module = transformers.BertForSequenceClassification(
            transformers.BertConfig(**{**MINILM, "num_hidden_layers": self.layers}, pad_token_id=0)
        )
        return model

    @cached_property
    def _room(self) -> int:
        return 512

    @cached_property
    def _labels(self) -> Tensor:
        return (torch.arange(NUM_ROWS) % 2).to(self.device)

    @cached_property
    def _train_tokens(self) -> Tokens:
        ids = Ragged.of(rows_of(30, 63, MINILM["vocab_size"]), self.device)
        return Tokens(ids, replace(ids, flat=torch.zeros_like(ids.flat)), 0)


@dataclass(frozen=True, kw_only=True)
class RandomAnswers(OneClient, MathInstructTask):
    """Instruction tuning on random tokens and random weights; the second half of a text is its answer."""

    num_clients: int = 1
    lora_rank: int | None = 16
    layers: int = SMOLLM["num_hidden_layers"]

    def _pretrained(self) -> nn.Module:
        transformers = library("transformers")
        model: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**SMOLLM, "num_hidden_layers": self.layers})
        )
        return model

    @cached_property
    def _room(self) -> int:
        return 2048

    @cached_property
    def _train_spans(self) -> Spans:
        rows = rows_of(100, 255, SMOLLM["vocab_size"])
        return Spans.of(rows, [len(row) // 2 for row in rows], [len(row) - 1 for row in rows], 0, self.device)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    steps: str
    ms: float


def ms_per_step(trainer: Trainer, num_steps: int) -> float:
    """The best of three jobs; the job before them captures and compiles."""
    model = GlobalModel(0, trainer.network.weights.clone())
    trainer.train(Dispatch(0, 0, model, 0))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        trainer.train(Dispatch(0, 0, model, 0))  # its loss is read at the end, for which it waits
        times.append(time.perf_counter() - began)
    return min(times) / num_steps * 1e3


def measured(
    name: str, task: Any, batch_size: int, num_steps: int, device: torch.device, precision: Precision
) -> Iterator[Row]:
    local = LocalTraining(
        optimizer="adamw", client_lr=3e-5, weight_decay=0.01, batch_size=batch_size, num_local_steps=num_steps
    )
    placed = task.on(str(device)).computing_in(precision.dtype)
    module, few = placed.network(0), placed.in_few_shapes()
    network = Layout.of(module).bind(module, device)
    yield Row(name, "eager", ms_per_step(Trainer(placed, local, network), num_steps))
    ways = {"replayed": False} | ({"replayed, compiled update": True} if device.type == "cuda" else {})
    for way, compiled in ways.items():
        steps = ReplayedSteps(few, local, network, compiled, print)
        yield Row(name, way, ms_per_step(Trainer(few, local, network, steps), num_steps))


MODELS: dict[str, tuple[str, type, int]] = {
    "minilm": ("MiniLM, batch 8", RandomPairs, 8),
    "llama": ("SmolLM2-135M, LoRA, batch 32", RandomAnswers, 32),
}


def shown(rows: Iterable[Row]) -> Iterator[Row]:
    """A table that grows as it is measured."""
    print("\n| model | steps | ms a step | times as fast |\n|---|---|---:|---:|", flush=True)
    first: dict[str, float] = {}
    for row in rows:
        ratio = first.setdefault(row.model, row.ms) / row.ms
        print(f"| {row.model} | {row.steps} | {row.ms:.2f} | {ratio:.2f} |", flush=True)
        yield row


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--precision", default="fp32", choices=list(DTYPES))
    parser.add_argument("--steps", type=at_least_one, default=100)
    parser.add_argument("--layers", type=at_least_one, help="fewer layers than the models have, to try it out")
    parser.add_argument("--models", type=listed(str, MODELS), default=["minilm"], help="minilm, llama, or both with a comma")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    if given.device == "cuda":
        need_gpu(parser)
    device = the_gpu() if given.device == "cuda" else torch.device("cpu")
    precision, fewer = Precision(DTYPES[given.precision]), {} if given.layers is None else {"layers": given.layers}
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {given.precision}, {given.steps} steps a job")
    with gpu_settings(precision, device):
        chosen = [(name, make(**fewer), size) for name, make, size in map(MODELS.__getitem__, given.models)]
        rows = list(shown(row for one in chosen for row in measured(*one, given.steps, device, precision)))
    keep(given.json, rows)


if __name__ == "__main__":
    main()

"""Milliseconds of one training step on text, eager against replayed: AdamW on batches of random tokens.

    python -m benchmarks.text_steps [--device cuda] [--precision fp32] [--steps 100] [--models minilm,mpnet] [--json FILE]

The models are made on the spot with random weights, which changes no time: BERT of all-MiniLM-L6-v2's size (6 layers, width 384),
BERT-base or MPNet-base, batch 8, 64 tokens with padding; or Llama of SmolLM2-135M's size with LoRA of rank 16 on queries and
values, batch 32, texts of 100 to 300 tokens and one of 380, half of each an answer, much as GSM8K's are. Each row has what the
rows before it have, but for eager. On a CPU "replayed" is the same work done at once, so nothing is gained there.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

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
from fedecho.tasks import mathinstruct
from fedecho.tasks.mathinstruct import MathInstructTask
from fedecho.tasks.mrpc import MrpcTask, Tokens

MINILM = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
BASE = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
SMOLLM = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM |= {"intermediate_size": 1536, "max_position_embeddings": 2048, "tie_word_embeddings": True}
NUM_ROWS = 512


def rows_of(least: int, most: int, longest: int, batch: int, vocabulary: int) -> list[list[int]]:
    """Random tokens; the first row of every batch is a longest, so that all have one width."""
    rng = np.random.default_rng(0)
    lengths = [longest if row % batch == 0 else int(rng.integers(least, most + 1)) for row in range(NUM_ROWS)]
    return [rng.integers(5, vocabulary, length).tolist() for length in lengths]


class OneClient:
    """All rows are one client's, and the first of a batch is a longest one."""

    size: ClassVar[int]

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Any:
        task: Any = super()
        return task.batch(client, rows - rows % self.size + torch.arange(len(rows)) % self.size, generator)

    @cached_property
    def _parts(self) -> Parts:
        return as_parts([np.arange(NUM_ROWS)])


@dataclass(frozen=True, kw_only=True)
class RandomPairs(OneClient, MrpcTask):
    """MRPC's training on random tokens and random weights."""

    size: ClassVar[int] = 8
    kind: ClassVar[str] = "Bert"
    sizes: ClassVar[dict[str, int]] = MINILM
    num_clients: int = 1
    layers: int | None = None

    def network(self, seed: int) -> nn.Module:
        transformers = library("transformers")
        fewer = {} if self.layers is None else {"num_hidden_layers": self.layers}
        config = getattr(transformers, f"{self.kind}Config")(**{**self.sizes, **fewer}, pad_token_id=0)
        model: nn.Module = getattr(transformers, f"{self.kind}ForSequenceClassification")(config)
        return model

    @cached_property
    def _room(self) -> int:
        return 512

    @cached_property
    def _labels(self) -> Tensor:
        return (torch.arange(NUM_ROWS) % 2).to(self.device)

    @cached_property
    def _train_tokens(self) -> Tokens:
        ids = Ragged.of(rows_of(30, 63, 63, self.size, self.sizes["vocab_size"]), self.device)
        return Tokens(ids, replace(ids, flat=torch.zeros_like(ids.flat)) if self.kind == "Bert" else None, 0)


class BertBasePairs(RandomPairs):
    sizes: ClassVar[dict[str, int]] = BASE


class MpnetPairs(BertBasePairs):
    kind: ClassVar[str] = "MPNet"


@dataclass(frozen=True, kw_only=True)
class RandomAnswers(OneClient, MathInstructTask):
    """Instruction tuning on random tokens and random weights; the second half of a text is its answer."""

    size: ClassVar[int] = 32
    num_clients: int = 1
    lora_rank: int | None = 16
    lora_targets: str = "q_proj,v_proj"
    packed: bool = True
    is_lean: bool = True
    layers: int = SMOLLM["num_hidden_layers"]

    def _pretrained(self) -> nn.Module:
        transformers = library("transformers")
        model: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**SMOLLM, "num_hidden_layers": self.layers})
        )
        return model

    def _network(self) -> nn.Module:
        with nullcontext() if self.is_lean else patch.object(mathinstruct, "lean", lambda model: model):
            return super()._network()

    @property
    def _packs(self) -> bool:  # type: ignore[override]
        return self.packed

    @cached_property
    def _room(self) -> int:
        return 2048

    @cached_property
    def _train_spans(self) -> Spans:
        rows = rows_of(100, 300, 380, self.size, SMOLLM["vocab_size"])
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


def measured(name: str, task: Any, num_steps: int, device: torch.device, precision: Precision) -> Iterator[Row]:
    """From eager on; what each way is called and which task it trains is for ``ways`` to say."""
    local = LocalTraining(optimizer="adamw", client_lr=3e-5, weight_decay=0.01, batch_size=task.size, num_local_steps=num_steps)
    for way, changed, kind in ways(task, device):
        placed = changed.on(str(device)).computing_in(precision.dtype)
        module = placed.network(0)
        network = Layout.of(module).bind(module, device)
        if kind == "eager":
            trainer = Trainer(placed, local, network)
        else:
            few = placed.in_few_shapes()
            trainer = Trainer(few, local, network, ReplayedSteps(few, local, network, kind == "compiled", print))
        yield Row(name, way, ms_per_step(trainer, num_steps))


def ways(task: Any, device: torch.device) -> Iterator[tuple[str, Any, str]]:
    plain = replace(task, packed=False, is_lean=False) if isinstance(task, RandomAnswers) else task
    yield "eager", plain, "eager"
    yield "replayed", plain, "replayed"
    if device.type == "cuda":
        yield "replayed, compiled update", plain, "compiled"
    kind = "compiled" if device.type == "cuda" else "replayed"
    if isinstance(task, RandomAnswers):
        yield "and texts share rows", replace(plain, packed=True), kind
        yield "and RMSNorm is torch's own", task, kind


MODELS: dict[str, tuple[str, type]] = {
    "minilm": ("MiniLM, batch 8", RandomPairs),
    "bert": ("BERT-base, batch 8", BertBasePairs),
    "mpnet": ("MPNet-base, batch 8", MpnetPairs),
    "llama": ("SmolLM2-135M, LoRA, batch 32", RandomAnswers),
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
    parser.add_argument("--models", type=listed(str, MODELS), default=["minilm"], help=", ".join(MODELS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    if given.device == "cuda":
        need_gpu(parser)
    device = the_gpu() if given.device == "cuda" else torch.device("cpu")
    precision, fewer = Precision(DTYPES[given.precision]), {} if given.layers is None else {"layers": given.layers}
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {given.precision}, {given.steps} steps a job")
    with gpu_settings(precision, device):
        chosen = [(name, make(**fewer)) for name, make in map(MODELS.__getitem__, given.models)]
        rows = list(shown(row for one in chosen for row in measured(*one, given.steps, device, precision)))
    keep(given.json, rows)


if __name__ == "__main__":
    main()

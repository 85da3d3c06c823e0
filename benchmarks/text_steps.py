"""Milliseconds of one training step on text, eager against replayed: AdamW on batches of random tokens.

    python -m benchmarks.text_steps [--precision bf16] [--steps 100] [--models minilm,mpnet] [--processes 8] [--json FILE]

The models are made on the spot with random weights, which changes no time: BERT of all-MiniLM-L6-v2's size (6 layers, width 384),
BERT-base or MPNet-base, batch 8, 64 tokens with padding; or Llama of SmolLM2-135M's size with LoRA of rank 16 on queries and
values, batch 32, texts of 100 to 300 tokens and one of 380, half of each an answer, much as GSM8K's are. Each row has what the
rows before it have, but for eager. Of several processes it is the time of a step in all: what passes until any of them has made
one. On a CPU "replayed" is the same work done at once, so nothing is gained there.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.arguments import at_least_one, listed, need_gpu
from benchmarks.kept import keep
from fedecho.core.layout import Layout
from fedecho.core.task import Batch
from fedecho.core.types import Dispatch, GlobalModel
from fedecho.gpu.capture import Precision
from fedecho.gpu.replay import ReplayedSteps
from fedecho.learning import LocalTraining, Trainer
from fedecho.runs.execution import DTYPES
from fedecho.runs.on_gpu import gpu_settings, select_gpu
from fedecho.tasks.partition import Parts, as_parts
from fedecho.tasks.text import mathinstruct
from fedecho.tasks.text.batches import Ragged, Spans
from fedecho.tasks.text.mathinstruct import MathInstructTask
from fedecho.tasks.text.mrpc import MrpcTask, Tokens
from fedecho.tasks.text.pretrained import library

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
    def _max_tokens(self) -> int:
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
    def _supports_packing(self) -> bool:  # type: ignore[override]
        return self.packed

    @cached_property
    def _max_tokens(self) -> int:
        return 2048

    @cached_property
    def _train_spans(self) -> Spans:
        rows = rows_of(100, 300, 380, self.size, SMOLLM["vocab_size"])
        return Spans.of(rows, [len(row) // 2 for row in rows], [len(row) - 1 for row in rows], 0, self.device)


class PlainLayers(ReplayedSteps):
    """Layers are not compiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._blocks = None


class Autocast(PlainLayers):
    """And every weight is cast in its layer."""

    def _cast_once(self, batch: Batch) -> list[str]:
        return []


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    steps: str
    ms: float
    processes: int = 1


@dataclass(frozen=True)
class Way:
    """What is measured; all that a process of its own must know."""

    model: str
    steps: str
    num_steps: int
    precision: Precision
    device: str
    kind: type | None = ReplayedSteps
    changes: tuple[tuple[str, Any], ...] = ()

    def trainer(self) -> Trainer:
        task = MODELS[self.model][1](**dict(self.changes)).on(self.device).computing_in(self.precision.dtype)
        local = LocalTraining(
            optimizer="adamw", client_lr=3e-5, weight_decay=0.01, batch_size=task.size, num_local_steps=self.num_steps
        )
        module = task.network(0)
        network = Layout.of(module).bind(module, self.device)
        if self.kind is None:
            return Trainer(task, local, network)
        few = task.in_few_shapes()
        return Trainer(few, local, network, self.kind(few, local, network, self.precision, print))

    def times(self, begin: Callable[[], Any] = lambda: None) -> list[float]:
        """Seconds of three jobs; the job before them captures and compiles."""
        with gpu_settings(self.precision, torch.device(self.device)):
            trainer = self.trainer()
            model = GlobalModel(0, trainer.network.weights.clone())
            trainer.train(Dispatch(0, 0, model, 0))
            begin()
            return [
                timed(lambda: trainer.train(Dispatch(0, 0, model, 0))) for _ in range(3)
            ]  # each waits for its loss at its end

    def row(self, processes: int) -> Row:
        name, _ = MODELS[self.model]
        if processes == 1:
            return Row(name, self.steps, min(self.times()) / self.num_steps * 1e3)
        context = get_context("spawn")
        barrier, found = context.Barrier(processes, timeout=300), context.Queue()
        children = [context.Process(target=_shared, args=(self, barrier, found), daemon=True) for _ in range(processes)]
        for child in children:
            child.start()
        seconds = max(found.get(timeout=600) for _ in children)
        for child in children:
            child.join()
        return Row(name, self.steps, seconds / (3 * self.num_steps * processes) * 1e3, processes)


def _shared(way: Way, barrier: Any, found: Any) -> None:
    """A process that shares the device with others."""
    if way.device != "cpu":
        select_gpu()
    found.put(sum(way.times(barrier.wait)))


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ways(model: str, num_steps: int, device: torch.device, dtype: torch.dtype, layers: int | None) -> Iterator[Way]:
    """From eager on; each has what those before it have."""
    text = issubclass(MODELS[model][1], RandomAnswers)
    less = (*(() if layers is None else (("layers", layers),)), *((("packed", False), ("is_lean", False)) if text else ()))
    plain = Precision(dtype, compiled=False)
    fast = Precision(dtype) if device.type == "cuda" else plain

    def way(steps: str, precision: Precision, kind: type | None = ReplayedSteps, **more: Any) -> Way:
        return Way(model, steps, num_steps, precision, str(device), kind, (*less, *more.items()))

    yield way("eager", plain, None)
    yield way("replayed", plain, Autocast)
    if device.type == "cuda":
        yield way("and the update is compiled", fast, Autocast)
    yield way("and weights are kept in low precision", fast, PlainLayers)
    if device.type == "cuda":
        yield way("and layers are compiled", fast)
    if text:
        yield way("and texts share rows", fast, packed=True)
        yield way("and RMSNorm is torch's own", fast, packed=True, is_lean=True)


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
    parser.add_argument(
        "--processes", type=at_least_one, default=1, help="how many share the device (under NVIDIA MPS, if it runs)"
    )
    parser.add_argument("--only", default="", help="the rows with these words")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    if given.device == "cuda":
        need_gpu(parser)
    device = select_gpu() if given.device == "cuda" else torch.device("cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {given.precision}, {given.steps} steps a job, {given.processes} at once")
    each = [way for model in given.models for way in ways(model, given.steps, device, DTYPES[given.precision], given.layers)]
    rows = list(shown(way.row(given.processes) for way in each if given.only in way.steps))
    keep(given.json, rows)


if __name__ == "__main__":
    main()

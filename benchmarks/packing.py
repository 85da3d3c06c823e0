"""Compare padding with packing of a language model's batches on a GPU, in computed tokens per token of text.

    python -m benchmarks.packing --model FOLDER [--data-dir DIR] [--seed 0]

Counted, not timed, over one pass of all clients over GSM8K's training set, in the batches of `fedecho table gsm8k`.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedecho.core.randomness import torch_rng
from fedecho.tasks.data_files import MissingDataError
from fedecho.tasks.text.batches import SpanBatch
from fedecho.tasks.text.mathinstruct import MathInstructTask

BATCH = 32
Shape = tuple[int, int, int]
"""Rows, their width, and predicted places."""


@dataclass(frozen=True)
class Apart(MathInstructTask):
    """No texts share a row."""

    @property
    def _packs(self) -> bool:  # type: ignore[override]
        return False


@dataclass(frozen=True)
class Count:
    texts: int
    shapes: Counter[Shape]

    @property
    def computed(self) -> int:
        return sum(times * rows * width for (rows, width, _), times in self.shapes.items())


def count(task: MathInstructTask) -> Count:
    task, texts, shapes = task.in_few_shapes(), 0, Counter[Shape]()
    for batch in batches(task):
        texts += int(batch.mask.sum())
        shapes[(*batch.ids.shape, len(batch.row))] += 1
    return Count(texts, shapes)


def batches(task: MathInstructTask) -> Iterator[SpanBatch]:
    for client in range(task.num_clients):
        generator = torch_rng(task.seed or 0, "packing", client)
        every: Tensor = torch.randperm(task.num_examples(client), generator=generator)
        yield from (task.batch(client, rows, generator) for rows in every.split(BATCH))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer; its weights are not read")
    parser.add_argument("--data-dir")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    settings = {"model": given.model, "train": "gsm8k-train", "data_dir": given.data_dir, "seed": given.seed}
    try:
        ways = {"a row each": count(Apart(**settings)), "several in a row": count(MathInstructTask(**settings))}
    except (MissingDataError, ValueError) as error:
        parser.error(str(error))
    print("| texts | tokens of text | tokens computed | computed / text | shapes of batch |\n|---|---:|---:|---:|---:|")
    for name, found in ways.items():
        share = found.computed / found.texts
        print(f"| {name} | {found.texts:,} | {found.computed:,} | {share:.2f} | {len(found.shapes)} |")


if __name__ == "__main__":
    main()

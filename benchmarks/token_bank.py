"""Memory of a language model's bank, and the error of top-k.

    python -m benchmarks.token_bank                                      # bytes, at the sizes of Qwen2.5-1.5B
    python -m benchmarks.token_bank --model FOLDER --data-dir DIR        # top-k's error on a real model and GSM8K's questions

Bytes are read off real banks. The exact one is filled whole; of the other two, whose entries grow with the number of texts and
nothing else, ``--texts`` are put in and the rest is proportion. The error is KL(full teacher || top-k teacher) in nats a token,
over clients that each trained the model for a few steps of LoRA.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.arguments import at_least_one
from fedecho.core.layout import Layout
from fedecho.core.task import Positions
from fedecho.core.types import Dispatch, GlobalModel, Weights
from fedecho.distill import normalized_entropy
from fedecho.distill.token_bank import Entry, FullLogits, HiddenStates, TokenBank, TokenStorage, TopLogits
from fedecho.learning.local import LocalTraining
from fedecho.learning.trainer import Trainer
from fedecho.tasks import MathInstructTask
from fedecho.tasks.partition import IidPartitioner

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """Qwen2.5-1.5B's vocabulary and width, the paper's 100 queries and 10 clients."""

    vocabulary: int = 151_936
    width: int = 1_536
    texts: int = 100
    tokens: int = 256
    clients: int = 10


def bytes_of(storage: TokenStorage, head: nn.Linear, sizes: Sizes, texts: int) -> int:
    """Of a bank that holds ``texts`` of every client."""
    bank = TokenBank(storage, Positions(torch.full((texts,), sizes.tokens)), CPU)
    generator = torch.Generator().manual_seed(0)
    for client in range(sizes.clients):
        parts: list[Entry] = [
            storage.entry(torch.randn(sizes.tokens, sizes.width, generator=generator), head) for _ in range(texts)
        ]
        bank.put(client, tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)), 0)
    return bank.num_bytes


def show_bytes(texts: int) -> None:
    sizes, half = Sizes(), torch.float16
    head = nn.Linear(sizes.width, sizes.vocabulary, bias=False).requires_grad_(False)
    found = {
        "full": bytes_of(FullLogits(sizes.vocabulary, half), head, sizes, texts) * sizes.texts // texts,
        "exact": bytes_of(HiddenStates(head, half), head, sizes, sizes.texts),
        "top-64": bytes_of(TopLogits(sizes.vocabulary, 64, half), head, sizes, texts) * sizes.texts // texts,
    }
    print(f"{sizes}, half precision")
    for name, num in found.items():
        print(f"{name:8} {num:>16,} bytes  {found['full'] / num:8.1f} times smaller than full")


def clients_of(task: MathInstructTask, num: int, steps: int) -> tuple[Trainer, list[Weights]]:
    """Models of clients that each trained for a few steps from the start."""
    module = task.network(0)
    network = Layout.of(module).bind(module)
    local = LocalTraining(optimizer="adamw", client_lr=2e-4, batch_size=2, num_local_steps=steps)
    trainer, start = Trainer(task, local, network), network.weights.clone()
    trained = []
    for client in range(num):
        update = trainer.train(Dispatch(client, client, GlobalModel(0, start), client))
        trained.append(Weights(start.params + update.delta, update.buffers))
    return trainer, trained


def show_error(model: str, data_dir: str | None, texts: int, clients: int, steps: int) -> None:
    task = MathInstructTask(
        model=model, train="gsm8k-train", num_clients=clients, num_unlabeled=texts, lora_rank=16, data_dir=data_dir,
        partition=IidPartitioner(),
    )  # fmt: skip
    trainer, models = clients_of(task, clients, steps)
    module, rows = trainer.network.module.eval(), torch.arange(texts)
    vocabulary = task.head(module).weight.shape[0]
    hidden = []
    for weights in models:
        trainer.network.load(weights)
        with torch.no_grad():
            hidden.append(task.hidden(module, rows))
    teachers: dict[str, Tensor] = {}
    for name, storage in {
        "full": FullLogits(vocabulary),
        "exact": HiddenStates(task.head(module)),
        "exact, half": HiddenStates(task.head(module), torch.float16),
        **{f"top-{k}": TopLogits(vocabulary, k) for k in (16, 64, 256)},
    }.items():
        with torch.no_grad():
            teachers[name] = storage.teacher([storage.entry(states, task.head(module)) for states in hidden])
    full = teachers.pop("full").log_softmax(dim=-1)
    print(f"{model}: {clients} clients after {steps} steps, {texts} queries, {len(full)} tokens, vocabulary {vocabulary:,}")
    print(f"the teacher's normalised entropy is {float(normalized_entropy(full)):.4f}")
    for name, teacher in teachers.items():
        log_q = teacher.log_softmax(dim=-1)
        kl = (full.exp() * (full - log_q)).sum(dim=-1)
        same = float((teacher.argmax(dim=-1) == full.argmax(dim=-1)).float().mean())
        told = (
            f"mean {float(kl.mean()):.2e}, largest {float(kl.max()):.2e} nats; the same label for {100 * same:.2f} % of tokens"
        )
        print(f"{name:12} KL(full || kept): {told}; normalised entropy {float(normalized_entropy(teacher)):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=at_least_one, default=1, help="texts that are really put into the large banks")
    parser.add_argument("--model", help="a folder of a causal language model")
    parser.add_argument("--data-dir", help="where GSM8K and models are (FEDECHO_DATA, or ./data)")
    parser.add_argument("--queries", type=at_least_one, default=10)
    parser.add_argument("--clients", type=at_least_one, default=5)
    parser.add_argument("--steps", type=at_least_one, default=4)
    options = parser.parse_args()
    began = time.perf_counter()
    if options.model:
        try:
            show_error(options.model, options.data_dir, options.queries, options.clients, options.steps)
        except ValueError as error:
            parser.error(str(error))
    else:
        show_bytes(options.texts)
    print(f"measured in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
